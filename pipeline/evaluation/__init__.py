"""The eval stage: what is evaluated (`targets`), how (`measure`), by whom (`workers`), and what
becomes of the numbers (`record`, `tables`). `command` is the verb `eval`."""
