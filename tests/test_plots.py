"""Figures are looked at by people; what a program can check of them is checked here."""

import re
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
    assert labels(panels(figure)[0].yaxis) == ["x", "y", "</s>"]  # once for all in a line
    assert figure.get_suptitle() == "Cross"


@pytest.mark.parametrize("widest, rotation", [("y", 0), ("Bundesgesetzblatt", 90)])
def test_source_tokens_are_upright_where_each_fits_its_cell(weights, widest, rotation):
    sources = ["a", "b", "c", widest]
    for panel in panels(plots.attention_figure(weights, sources, "xyz")):
        assert {label.get_rotation() for label in panel.get_xticklabels()} == {rotation}


def test_the_first_target_token_is_the_top_row(weights):
    (panel,) = panels(plots.attention_figure(weights[0], "abcd", "xyz"))
    bottom, top = panel.get_ylim()
    assert bottom > top


def test_the_mean_of_heads_is_one_panel_without_a_number(weights):
    (panel,) = panels(plots.attention_figure(weights.mean(0), "abcd", "xyz"))
    assert panel.get_title() == ""


@pytest.mark.parametrize("pair", ["한글", "狗猫", "のカ"])
def test_hangul_and_cjk_are_glyphs_not_boxes(pair):
    """Boxes are all alike: two figures that differ in one character must look different."""
    if not all(map(has_font_for, pair)):
        pytest.skip(f"no installed font has {pair}; apt install fonts-noto-cjk")
    one, other = (pixels(plots.attention_figure([[1.0]], [c], ["x"], "")) for c in pair)
    assert one.shape == other.shape
    assert (one != other).any()


def test_umlauts_need_no_font_but_matplotlibs_own(only_latin):
    one, other = (pixels(plots.attention_figure([[1.0]], [c], ["ß"], "Größe")) for c in "äü")
    assert (one != other).any()


def test_without_a_font_the_figure_says_what_to_install(only_latin):
    with pytest.warns(UserWarning, match=r"2 of the characters \(글 한\).*fonts-noto-cjk"):
        figure = plots.attention_figure([[1.0]], ["▁한글"], ["é"], "한")
    (panel,) = panels(figure)
    assert labels(panel.xaxis) == ["␣□□"]
    assert labels(panel.yaxis) == ["é"]
    pixels(figure)  # and matplotlib has nothing left to warn of


def test_a_font_that_was_installed_after_matplotlib_looked_is_found(monkeypatch):
    from matplotlib.font_manager import fontManager

    if not has_font_for("한"):
        pytest.skip("no installed font has 한; apt install fonts-noto-cjk")
    first_day = [font for font in fontManager.ttflist if font.name == fonts.BASE_FONT]
    monkeypatch.setattr(fontManager, "ttflist", first_day)
    _, families = fonts.with_fonts(["한"])
    assert len(families) == 2


def test_tokens_are_text_whatever_they_are_made_of():
    """Dollars are not formulas, line ends do not break lines, long tokens do not push."""
    sources = ["$x$", "$\\frac$", "a\nb", "▁", "\u200b"]
    figure = plots.attention_figure(np.eye(5), sources, ["z" * 99, *"abcd"], "5 $ and 6 $")
    (panel,) = panels(figure)
    assert labels(panel.xaxis) == ["$x$", "$\\frac$", "a\\nb", "␣", "\\u200b"]
    assert labels(panel.yaxis)[0] == "z" * 22 + "…"
    pixels(figure)


@pytest.mark.parametrize("shape", [(2, 4, 3), (3, 3), (4,), (1, 2, 3, 4)])
def test_weights_must_fit_the_tokens(shape):
    with pytest.raises(ValueError, match=r"\[heads target source\].*for 3 and 4 tokens"):
        plots.attention_figure(np.zeros(shape), "abcd", "xyz")


def test_there_must_be_a_token_to_look():
    with pytest.raises(ValueError, match="for 0 and 1 tokens"):
        plots.attention_figure(np.zeros((2, 0, 1)), "a", "")


@pytest.mark.parametrize("shape", [(1, 448, 447), (4, 300, 300)])
def test_more_weights_than_a_picture_shows_are_refused_with_what_shows_them(shape):
    tokens = ["a"] * shape[2], ["b"] * shape[1]
    with pytest.raises(ValueError) as error:
        plots.attention_figure(np.zeros(shape), *tokens)
    assert re.fullmatch(
        rf"a figure shows at most 200,000 weights; got {shape[0]} heads of {shape[1]} target "
        rf"by {shape[2]} source tokens\. Draw one head \(--head N\), a page \(--output "
        r"x\.html\), or a shorter sentence\.",
        str(error.value),
    )


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


@pytest.mark.parametrize("shapes", [((3, 4), (4, 4)), ((4,), (4,)), ((0, 4), (0, 4))])
def test_positions_of_different_shapes_are_refused(shapes):
    with pytest.raises(ValueError, match=r"\[positions d_model\] and of equal shape; got"):
        plots.positions_figure(*map(np.zeros, shapes))


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


def test_no_point_of_a_steady_curve_is_cut_off():
    speeds = [41_000, 41_010, 41_005]
    records = [{"step": s, "tokens_per_second": speed} for s, speed in enumerate(speeds)]
    bottom, top = plots.curves_figure(records).axes[3].get_ylim()
    assert bottom == 0
    assert top > 1.02 * max(speeds)


@pytest.mark.parametrize(
    "name, magic", [("a.png", b"\x89PNG"), ("a.PDF", b"%PDF"), ("a.svg", b"<?xml")]
)
def test_a_suffix_chooses_the_format(tmp_path, name, magic):
    plots.save(plots.curves_figure([]), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_another_suffix_is_answered_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"\.png, \.svg or \.pdf; got .*a\.jpg"):
        plots.save(plots.curves_figure([]), tmp_path / "a.jpg")


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="no folder .*nowhere"):
        plots.save(plots.curves_figure([]), tmp_path / "nowhere" / "a.png")


def test_a_reader_of_the_old_file_never_sees_half_of_the_new(tmp_path):
    """The old file is replaced, not written over: who has it open, or linked, keeps it."""
    path, held = tmp_path / "a.png", tmp_path / "held"
    path.write_text("the old one")
    held.hardlink_to(path)
    plots.save(plots.curves_figure([]), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert held.read_text() == "the old one"


def test_a_figure_that_fails_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_text("the old one")
    figure = plots.curves_figure([])

    def dies_halfway(file, **settings):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(figure, "savefig", dies_halfway)
    with pytest.raises(OSError, match="disk full"):
        plots.save(figure, path)
    assert path.read_text() == "the old one"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plots.attention_figure([[1.0]], ["한"], ["b"]),
        lambda: plots.positions_figure(np.zeros((1, 2)), np.zeros((1, 2))),
        lambda: plots.curves_figure([]),
    ],
)
def test_without_matplotlib_the_extra_to_install_is_named(monkeypatch, draw):
    find_spec = plots.importlib.util.find_spec
    missing = {"matplotlib": None}
    monkeypatch.setattr(
        plots.importlib.util,
        "find_spec",
        lambda name, *rest: missing[name] if name in missing else find_spec(name, *rest),
    )
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
