"""An HTTP server with LibreTranslate's API; it needs the extra `server`."""

import importlib.util

NEEDED = ("starlette", "uvicorn", "sentencex", "python_multipart")


def check_installed(purpose: str, *modules: str) -> None:
    """Raise ImportError, with the command that installs them, unless all modules are there.

    purpose: what needs them, as the subject of a sentence in the plural.
    """
    missing = [name for name in modules or NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"{purpose} need {missing[0].replace('_', '-')}; install it with: "
            "pip install 'flaxformer_min[server]'"
        )
