"""Weight formats by name."""

from worker.registry import Registry

FORMATS = Registry(
    "weight format",
    "format",
    {
        "unquantized": "worker.quantization.unquantized:Unquantized",
        "mxfp4": "worker.quantization.mxfp4:Mxfp4",
        "fp8_block": "worker.quantization.fp8_block:Fp8Block",
        "int4": "worker.quantization.int4:Int4",
    },
)
