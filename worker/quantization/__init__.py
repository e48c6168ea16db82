"""Weight formats by name."""

from worker.registry import Registry

FORMATS = Registry(
    "weight format",
    "format",
    {
        "unquantized": "worker.quantization.unquantized:Unquantized",
        "mxfp4": "worker.quantization.mxfp4:Mxfp4",
    },
)
