"""Many GPUs behind one OpenAI-compatible address: ``serve run serve_app:app model=FOLDER``.

``app`` is the builder of the Serve application. It is loaded on first use, so that the pure rooms below this
package can be imported without Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve_app.build import app

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    if name == "app":
        from serve_app.build import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
