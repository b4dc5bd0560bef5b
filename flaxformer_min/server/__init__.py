"""An HTTP server with LibreTranslate's API; it needs the extra `server`."""

import importlib.util

NEEDED = ("starlette", "uvicorn", "sentencex", "python_multipart")


def check_installed(what_needs: str, *modules: str) -> None:
    """Raise ImportError, with the command that installs them, unless all modules are there.

    what_needs: how the message begins, such as "Servers need".
    """
    missing = [name for name in modules or NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(name.replace("_", "-") for name in missing)
        command = "pip install 'flaxformer_min[server]'"
        raise ImportError(f"{what_needs} {names}; install the extra with: {command}")
