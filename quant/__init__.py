"""Block-scaled 4-bit and 8-bit training arithmetic: formats, quantizers, recipes, linears.

q = quantize(x, NVFP4)                                        # one tensor
precision = apply_recipe(model, named_recipe("nvfp4"), num_blocks=52, seed=0)
precision.begin(step, microbatch); loss(model(x)).backward()  # one micro-batch
"""

from quant.formats import FORMATS, FP8_BLOCK, FP8_BLOCK_2D, MXFP4, MXFP8, NVFP4, NVFP4_2D, Format
from quant.hadamard import rht_transpose
from quant.linear import QuantLinear
from quant.policy import LayerPrecision, Precision, apply_recipe
from quant.quantize import QuantizedTensor, dequantize, quantize
from quant.recipe import (
    LINEAR_RECIPES,
    RECIPES,
    LinearRecipe,
    Operand,
    Recipe,
    named_recipe,
    recipe_from_dict,
)
from quant.rounding import Copy, Role, RoundingKey
from quant.statistics import Statistics

__all__ = [
    "FORMATS",
    "FP8_BLOCK",
    "FP8_BLOCK_2D",
    "LINEAR_RECIPES",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "NVFP4_2D",
    "RECIPES",
    "Copy",
    "Format",
    "LayerPrecision",
    "LinearRecipe",
    "Operand",
    "Precision",
    "QuantLinear",
    "QuantizedTensor",
    "Recipe",
    "Role",
    "RoundingKey",
    "Statistics",
    "apply_recipe",
    "dequantize",
    "named_recipe",
    "quantize",
    "recipe_from_dict",
    "rht_transpose",
]
