"""Figures are looked at by people; what a program can check of them is checked here."""

import struct
import subprocess
import sys

import numpy as np
import pytest

from flaxformer_min.plots import figures as plots
from flaxformer_min.plots import fonts

pytest.importorskip("matplotlib", reason="figures need matplotlib: the extra `plots`")


def has_font_for(character: str) -> bool:
    fonts._add_new_fonts()
    return any(character in fonts._characters_of(*font) for font in fonts._regular_fonts().values())


def pixels(figure) -> np.ndarray:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def panels(figure):
    return [axes for axes in figure.axes if axes.images and axes.get_label() != "<colorbar>"]


def labels(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


@pytest.fixture
def weights():
    """Two heads, three target tokens, four source tokens."""
    scores = np.random.default_rng(0).random((2, 3, 4))
    return scores / scores.sum(-1, keepdims=True)


@pytest.fixture
def only_latin(monkeypatch):
    """A machine with the fonts that matplotlib brings, and no other."""
    latin = {fonts.BASE_FONT: fonts._regular_fonts()[fonts.BASE_FONT]}
    monkeypatch.setattr(fonts, "_regular_fonts", lambda: latin)
    monkeypatch.setattr(fonts, "_add_new_fonts", lambda: None)


def test_every_head_has_its_panel_with_tokens_on_both_axes(weights):
    figure = plots.attention_figure(weights, ["▁a", "b", "c", "."], ["x", "y", "</s>"], "Cross")
    for panel, head in zip(panels(figure), weights, strict=True):
        np.testing.assert_allclose(panel.images[0].get_array(), head, atol=1e-7)
        assert labels(panel.xaxis) == ["␣a", "b", "c", "."]
        assert panel.images[0].get_clim() == (0, pytest.approx(weights.max()))
    assert [panel.get_title() for panel in panels(figure)] == ["head 1", "head 2"]
    bottom, top = panels(figure)[0].get_ylim()
    assert bottom > top  # the first target token is the top row
    assert labels(panels(figure)[0].yaxis) == ["x", "y", "</s>"]  # once for all in a line
    assert figure.get_suptitle() == "Cross"


@pytest.mark.parametrize("pair", ["한글", "狗猫", "のカ"])
def test_hangul_and_cjk_are_glyphs_not_boxes(pair):
    """Boxes are all alike: two figures that differ in one character must look different."""
    if not all(map(has_font_for, pair)):
        pytest.skip(f"no installed font has {pair}; apt install fonts-noto-cjk")
    one, other = (pixels(plots.attention_figure([[1.0]], [c], ["x"], "")) for c in pair)
    assert one.shape == other.shape
    assert (one != other).any()


def test_without_a_font_the_figure_says_what_to_install(only_latin):
    with pytest.warns(UserWarning, match=r"2 of the characters \(글 한\).*fonts-noto-cjk"):
        figure = plots.attention_figure([[1.0]], ["▁한글"], ["é"], "한")
    (panel,) = panels(figure)
    assert labels(panel.xaxis) == ["␣□□"]
    assert labels(panel.yaxis) == ["é"]
    pixels(figure)  # and matplotlib has nothing left to warn of


def test_tokens_are_text_whatever_they_are_made_of():
    """Dollars are not formulas, line ends do not break lines, long tokens do not push."""
    sources = ["$x$", "$\\frac$", "a\nb", "▁", "\u200b"]
    figure = plots.attention_figure(np.eye(5), sources, ["z" * 99, *"abcd"], "5 $ and 6 $")
    (panel,) = panels(figure)
    assert labels(panel.xaxis) == ["$x$", "$\\frac$", "a\\nb", "␣", "\\u200b"]
    assert labels(panel.yaxis)[0] == "z" * 22 + "…"
    pixels(figure)


@pytest.mark.parametrize("shape", [(2, 4, 3), (4,), (1, 2, 3, 4)])
def test_weights_must_fit_the_tokens(shape):
    with pytest.raises(ValueError, match=r"\[heads target source\].*for 3 and 4 tokens"):
        plots.attention_figure(np.zeros(shape), "abcd", "xyz")


def test_more_weights_than_a_picture_shows_are_refused_with_what_shows_them():
    error = r"at most 200,000 weights; got 4 heads of 300 target by 300 source tokens\. Draw one"
    with pytest.raises(ValueError, match=error):
        plots.attention_figure(np.zeros((4, 300, 300)), ["a"] * 300, ["b"] * 300)


@pytest.mark.parametrize("tokens, expected", [(30, None), (400, 6_000)])
def test_an_image_of_many_tokens_has_no_side_of_more_than_6000_pixels(tmp_path, tokens, expected):
    """It would take gigabytes; one of few tokens has 150 dots per inch."""
    figure = plots.attention_figure(np.zeros((2, tokens)), ["a"] * tokens, ["b"] * 2)
    plots.save(figure, tmp_path / "map.png")
    size = struct.unpack(">II", (tmp_path / "map.png").read_bytes()[16:24])
    expected = expected or 150 * max(figure.get_size_inches())
    assert expected - 2 <= max(size) <= expected


@pytest.mark.parametrize("wrong", [-0.5, 3.0, np.nan])
def test_scores_before_the_softmax_are_no_weights(weights, wrong):
    weights[0, 0, 0] = wrong
    with pytest.raises(ValueError, match="from 0 to 1.*after the softmax"):
        plots.attention_figure(weights, "abcd", "xyz")


def test_both_layouts_of_the_positions_stand_side_by_side():
    one, other = np.random.default_rng(0).uniform(-1, 1, (2, 20, 512))
    left, right = panels(plots.positions_figure(one, other))
    np.testing.assert_allclose(left.images[0].get_array(), one, atol=1e-6)
    np.testing.assert_allclose(right.images[0].get_array(), other, atol=1e-6)
    assert left.get_title().startswith("interleaved")
    assert right.get_title().startswith("halves")
    assert left.get_position().x1 < right.get_position().x0


def curve(axes, number=0):
    return axes.lines[number].get_xydata().tolist()


def test_curves_hold_what_was_recorded():
    training = {"accuracy": 0.5, "gradient_norm": 1.0}
    records = [
        {"step": 1, "loss": 9.0, "learning_rate": 1e-5, "tokens_per_second": 100.0, **training},
        {"step": 2, "loss": 8.0, "learning_rate": 2e-5, "tokens_per_second": 300.0, **training},
        {"step": 2, "validation_loss": 8.5, "validation_perplexity": 4915, "validation_bleu": 3.0},
    ]
    loss, score, rate, speed = plots.curves_figure(records).axes
    assert curve(loss) == [[1, 9], [2, 8]]
    assert curve(loss, 1) == [[2, 8.5]]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["training", "validation"]
    assert curve(score) == [[2, 3]]
    assert curve(rate) == [[1, 1e-5], [2, 2e-5]]
    assert curve(speed) == [[1, 100], [2, 300]]


def test_a_step_that_was_run_again_counts_once():
    """A run that was killed goes on from its checkpoint and writes some steps twice."""
    losses = [(1, 9.0), (2, 8.0), (3, 7.0), (2, 6.0)]
    figure = plots.curves_figure({"step": step, "loss": loss} for step, loss in losses)
    assert curve(figure.axes[0]) == [[1, 9], [2, 6], [3, 7]]


def test_what_was_not_recorded_is_said_in_its_panel():
    figure = plots.curves_figure([{"step": 1, "loss": 2.0, "learning_rate": None}, {"loss": 1.0}])
    said = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert said == [[], ["not recorded"], ["not recorded"], ["not recorded"]]
    pixels(figure)
    pixels(plots.curves_figure([]))


@pytest.mark.parametrize(
    "name, magic", [("a.png", b"\x89PNG"), ("a.PDF", b"%PDF"), ("a.svg", b"<?xml")]
)
def test_a_suffix_chooses_the_format(tmp_path, name, magic):
    plots.save(plots.curves_figure([]), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "name, error",
    [("a.jpg", r"\.png, \.svg or \.pdf; got .*a\.jpg"), ("nowhere/a.png", "no folder .*nowhere")],
)
def test_another_suffix_or_folder_is_refused(tmp_path, name, error):
    with pytest.raises(ValueError, match=error):
        plots.save(plots.curves_figure([]), tmp_path / name)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plots.attention_figure([[1.0]], ["한"], ["b"]),
        lambda: plots.positions_figure(np.zeros((1, 2)), np.zeros((1, 2))),
        lambda: plots.curves_figure([]),
    ],
)
def test_without_matplotlib_the_extra_to_install_is_named(monkeypatch, draw):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(ImportError, match=r"pip install 'flaxformer_min\[plots\]'"):
        draw()


def test_figures_are_made_without_the_global_state_of_pyplot():
    program = (
        "import sys, flaxformer_min.plots.figures as plots\n"
        "assert 'matplotlib' not in sys.modules\n"
        "plots.attention_figure([[1.0]], ['a'], ['b'])\n"
        "plots.curves_figure([])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
