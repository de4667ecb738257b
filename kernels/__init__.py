"""Fast paths of the quantizers. Each equals the torch reference in `quant` to the byte."""
