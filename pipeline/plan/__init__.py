"""What a run will take, before it takes it: memory, time, bytes and money from formulas alone."""
