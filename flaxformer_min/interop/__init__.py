"""Export and import of models: CTranslate2, Marian of Hugging Face, StableHLO."""

from collections.abc import Collection
from pathlib import Path

FORMATS = ("ctranslate2", "marian", "stablehlo")

OPTIONS = {
    "quantization": ("ctranslate2", ("int8", "int16", "float16", "bfloat16")),
    "weights": ("stablehlo", ("inside", "beside")),
}
"""The format and the values of each option."""


def export(
    run: str | Path,
    out: str | Path,
    *,
    format: str,
    quantization: str | None = None,
    weights: str | None = None,
) -> None:
    """Write the model that a run translates with as a folder `out` in another format.

    format:       "ctranslate2", "marian" (Hugging Face) or "stablehlo"; see docs/interop.md.
    quantization: of CTranslate2's weights: "int8", "int16", "float16" or "bfloat16"; None: float32.
    weights:      of StableHLO: "inside" of the program, or "beside" it, which None means, too.

    Raises ValueError for a run that the format cannot express, and for a folder that is not empty;
    ImportError where ctranslate2 or flatbuffers is not installed.
    """
    from flaxformer_min.interop.run_model import check_new_folder, read_run
    from flaxformer_min.system.files import folder_atomically

    _check_choice("format", format, FORMATS)
    path = check_new_folder(out)
    for name, value in (("quantization", quantization), ("weights", weights)):
        if value is not None:
            own_format, choices = OPTIONS[name]
            _check_choice(name, value, choices)
            if format != own_format:
                raise ValueError(
                    f"{name} is an option of format={own_format!r}; got it with {format!r}. Leave "
                    "it out."
                )
    model = read_run(run)
    with folder_atomically(path) as folder:
        if format == "ctranslate2":
            from flaxformer_min.interop.ctranslate2 import write_ctranslate2

            write_ctranslate2(model, folder, quantization)
        elif format == "marian":
            from flaxformer_min.interop.marian import write_marian

            write_marian(model, folder)
        else:
            from flaxformer_min.interop.stablehlo import write_stablehlo

            write_stablehlo(model, folder, weights_inside=weights == "inside")


def import_model(model: str | Path, run: str | Path, *, ignore: Collection[str] = ()) -> None:
    """Make a run folder from a Marian model: of Hugging Face, or Marian's own npz with its spm.

    The run translates, scores and exports as any other, and `training.init_from` fine-tunes it.

    model:  the model's folder, or an .npz in one that has several.
    ignore: names of settings to leave out that this package's search does not have. They are noted
            in import.json of the run.

    Raises ValueError for a model that is damaged, or in any part not understood.
    """
    from flaxformer_min.interop.marian_import import import_marian

    try:
        import_marian(Path(model), Path(run), tuple(ignore))
    except MemoryError as error:
        raise ValueError(
            f"there is too little memory to import {model}: it takes about three times the size of "
            "the weights in float32. Free some, or import it on another machine and copy the run."
        ) from error


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}.")
