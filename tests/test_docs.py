"""Documentation that can be wrong is run: examples, generated parts, names of files, commands and targets."""

import importlib.util
import inspect
import json
import pkgutil
import re
import shutil
import textwrap

import pytest

import kvscout
from kvscout.cli.main import commands, parser

DOCS = (
    "docs/hopper-kernels.md",
    "docs/measured-facts.md",
    "docs/numerics.md",
    "docs/performance.md",
    "docs/porting.md",
    "docs/prebuilt-kernels.md",
    "docs/shapes-csv.md",
    "docs/support-matrix.md",
    "docs/tuning.md",
)
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *DOCS)
GENERATED = re.compile(r"<!-- begin generated: ([\w-]+) -->")
FENCED = re.compile(r"^([ ]*)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)

DOCTESTS = """
import doctest, importlib, json, pkgutil
import kvscout

found = {}
public = {name: getattr(kvscout, name) for name in kvscout.__all__}
for module in pkgutil.walk_packages(kvscout.__path__, "kvscout."):
    # Variants and kernels may need packages that are not here; a command runs when it is imported as __main__.
    if not {"variants", "kernels", "__main__"} & set(module.name.split(".")):
        result = doctest.testmod(importlib.import_module(module.name), extraglobs=public)
        found[module.name] = (result.attempted, result.failed)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def generate(root):
    spec = importlib.util.spec_from_file_location("generate", root / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fenced(text, language):
    """The code blocks of a language, without their indentation."""
    return [textwrap.dedent(block) for _, found, block in FENCED.findall(text) if found == language]


class TestGenerated:
    def test_nothing_is_out_of_date(self, generate):
        assert not [f"{page.name} is out of date; run: make docs" for page, _ in generate.stale()]

    def test_every_part_is_on_a_page(self, generate, root):
        found = {name: re.findall(GENERATED, (root / name).read_text()) for name in generate.PAGES}
        assert all(found.values())
        assert len(found["README.md"]) == len(set(found["README.md"]))
        assert {part for parts in found.values() for part in parts} == set(generate.PARTS)

    def test_the_readme_shows_a_whole_run_of_the_demo(self, generate):
        shown = generate.demo_output()
        assert all(word in shown for word in ("prefill", "decode", "tokens/s", "pa_decode", "wrote"))

    def test_the_demo_does_not_read_its_own_output(self, root):
        """It reads the beginning of the README, so that its output there does not change what it prints."""
        before, _, _ = (root / "README.md").read_bytes().partition(b"<!-- begin generated: demo-output -->")
        assert len(before) >= parser().parse_args(["demo"]).max_tokens

    def test_a_change_by_hand_is_seen(self, generate, root):
        text = (root / "README.md").read_text()
        changed = text.replace("| `mqa_logits` | `torch_reference` |", "| `mqa_logits` | `torch_reverence` |")
        assert changed != text
        assert generate.render(changed) == text

    def test_every_public_name_and_variant_is_listed(self, generate, root):
        readme = (root / "README.md").read_text()
        assert not [name for name in kvscout.__all__ if f"| `{name}` |" not in readme]
        names = [path.stem for path in (root / "kvscout" / "ops").glob("*/variants/[!_]*.py")]
        assert names
        assert not [name for name in names if f"| `{name}` |" not in (root / "docs/support-matrix.md").read_text()]


class TestFigures:
    def test_none_is_out_of_date(self, generate):
        assert not [f"{file.name} is out of date; run: make docs" for file, _ in generate.stale_figures()]

    def test_they_are_there_and_small(self, generate):
        sizes = {file.name: file.stat().st_size for file in generate.FIGURES.glob("*.svg")}
        assert sizes
        assert max(sizes.values()) < 100_000

    def test_what_was_edited_is_gone_or_is_of_nothing_is_out_of_date(self, generate, tmp_path, monkeypatch):
        copy = tmp_path / "figures"
        shutil.copytree(generate.FIGURES, copy)
        monkeypatch.setattr(generate, "FIGURES", copy)
        assert list(generate.stale_figures()) == []
        edited, gone, *_ = sorted(copy.glob("*.svg"))
        edited.write_text(edited.read_text().replace("deepgemm", "ours", 1))
        gone.unlink()
        (copy / "old.svg").write_text("<svg/>")
        found = {file.name: chart and chart.name for file, chart in generate.stale_figures()}
        assert found == {edited.name: edited.stem, gone.name: gone.stem, "old.svg": None}

    def test_they_are_drawn_anew_and_removed(self, generate, tmp_path):
        chart = next(chart for run in generate.runs() for chart in generate.charts.charts(run))
        drawn, old = tmp_path / "figures" / "new.svg", tmp_path / "old.svg"
        old.touch()
        generate.draw([(drawn, chart), (old, None)])
        assert generate.drawing.is_current(drawn.read_text(), chart)
        assert not old.exists()

    def test_checking_needs_no_matplotlib(self, run_python, root):
        code = (
            "import runpy, sys; sys.modules['matplotlib'] = None\n"
            "sys.argv = ['generate.py', '--check']; runpy.run_path('docs/generate.py', run_name='__main__')"
        )
        assert run_python("-c", code, cwd=root).returncode == 0


class TestPerformance:
    def test_every_kept_run_is_on_the_page(self, generate, root):
        page = (root / "docs/performance.md").read_text()
        files = sorted((root / "benchmarks/results").glob("*/bench-*.json"))
        assert files
        assert all(f"](../{file.relative_to(root).as_posix()})" in page for file in files)
        assert all(f"](figures/{figure.name})" in page for figure in generate.FIGURES.glob("*.svg"))


class TestShapes:
    def test_every_column_of_every_op_is_listed(self, generate):
        for op in generate.ops():
            listed = re.findall(r"^\| `(\w+)` \|", generate._columns(op), re.MULTILINE)
            assert listed == list(generate.shapes_csv.columns(op))

    @pytest.mark.parametrize("op", ["mqa_logits", "pa_decode"])
    def test_what_columns_mean_is_said(self, generate, op):
        rows = [line.split(" | ") for line in generate._columns(op).splitlines()[2:]]
        assert not [name for name, *_, meaning in rows if not meaning.strip(" |")]

    def test_the_example_and_the_files_to_start_from_can_be_read(self, generate, root, tmp_path):
        (example,) = fenced((root / "docs/shapes-csv.md").read_text(), "text")
        (tmp_path / "example.csv").write_text(example)
        assert [case.op for case in generate.shapes_csv.read(tmp_path / "example.csv")] == [
            "mqa_logits",
            "topk",
            "pa_decode",
        ]
        files = list((root / "benchmarks/shapes").glob("*.csv"))
        assert files
        assert all(generate.shapes_csv.read(file) for file in files)


class TestMeasured:
    @pytest.fixture
    def results(self, tmp_path):
        (tmp_path / "gpu").mkdir()

        def write(name, time, key, *records):
            records = [dict(zip(("op", "variant", "status"), record, strict=True)) for record in records]
            content = {"time": time, "machine": {"device": "GPU"}, key: records}
            (tmp_path / "gpu" / f"{name}.json").write_text(json.dumps(content))
            return tmp_path

        return write

    def test_none(self, generate, tmp_path):
        assert generate.measured(tmp_path) == {}

    def test_verified_and_timed(self, generate, results):
        results("v", "2030-01-02T", "outcomes", ("a", "x", "passed"), ("a", "x", "refused"), ("a", "y", "refused"))
        folder = results("b", "2030-01-03T", "measurements", ("a", "x", "passed"), ("a", "y", "skipped"))
        assert generate.measured(folder) == {("a", "x"): ["GPU: 1 cases right (2030-01-02), 1 timed"]}

    def test_failures_are_shown(self, generate, results):
        folder = results("v", "2030-01-02T", "outcomes", ("a", "x", "passed"), ("a", "x", "failed"))
        assert generate.measured(folder) == {("a", "x"): ["GPU: 1 of 2 cases WRONG (2030-01-02)"]}

    def test_the_newest_counts(self, generate, results):
        results("a", "2030-01-03T", "outcomes", ("a", "x", "passed"))
        folder = results("b", "2030-01-02T", "outcomes", ("a", "x", "failed"))
        assert generate.measured(folder) == {("a", "x"): ["GPU: 1 cases right (2030-01-03)"]}


class TestGpuMatrix:
    @pytest.fixture
    def run_on(self, generate, tmp_path):
        def of(*files):
            for number, (time, key, status) in enumerate(files):
                path = tmp_path / "gpu" / f"{number}.json"
                path.parent.mkdir(exist_ok=True)
                record = {"op": "a", "variant": "x", "status": status}
                path.write_text(json.dumps({"time": time, "machine": {"arch": "gfx942"}, key: [record]}))
            return generate.run_on(tmp_path).get(("a", "x", "gfx942"))

        return of

    @pytest.mark.parametrize(
        ("files", "cell"),
        [
            ([("1", "outcomes", "passed")], "run"),
            ([("1", "outcomes", "refused")], None),
            ([("1", "measurements", "passed")], "measured"),
            ([("2", "measurements", "passed"), ("1", "outcomes", "passed")], "measured"),
            ([("1", "measurements", "passed"), ("2", "outcomes", "passed")], "measured"),
            ([("1", "measurements", "passed"), ("2", "outcomes", "failed")], "WRONG"),
            ([("1", "outcomes", "failed"), ("2", "outcomes", "passed")], "run"),
            ([("1", "outcomes", "failed"), ("2", "measurements", "passed")], "WRONG"),
        ],
    )
    def test_what_result_files_say(self, run_on, files, cell):
        assert run_on(*files) == cell

    def test_every_cell_says_what_is_known(self, generate):
        lines = generate.gpu_matrix().splitlines()[2:]
        cells = {tuple(cell.strip(" `") for cell in line.strip("|").split("|")[:2]): line for line in lines}
        assert cells["mqa_logits", "triton_staged"].count("| compiled ") == 6
        assert cells["mqa_logits", "cute_wgmma"].count("| refused ") == 6
        assert "| measured " in cells["mqa_logits", "cute_wgmma"]
        assert not [name for _, name in cells if name.startswith("torch_")]


@pytest.mark.parametrize("page", ["README.md", "docs/measured-facts.md", "docs/porting.md"])
def test_python_blocks_run(page, root, run_python):
    blocks = fenced((root / page).read_text(), "python")
    assert blocks
    for block in blocks:
        assert run_python("-c", block).stdout


def test_docstring_examples(run_python):
    done = run_python("-c", DOCTESTS)
    *complaints, found = done.stdout.splitlines()
    results = json.loads(found)
    assert not [name for name, (_, failed) in results.items() if failed], "\n".join(complaints)
    assert sum(attempted for attempted, _ in results.values()) > 5


def test_every_public_function_has_an_example():
    functions = [function for name in kvscout.__all__ if inspect.isfunction(function := getattr(kvscout, name))]
    assert functions
    assert not [function.__name__ for function in functions if ">>>" not in (function.__doc__ or "")]


def test_the_version_has_its_date_in_the_changelog(root):
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert dict(headings)[kvscout.__version__]


def test_the_steps_of_adding_a_variant_write_the_docs(root):
    """Without them :class:`TestGenerated` fails."""
    section = (root / "CONTRIBUTING.md").read_text().partition("## Add a variant")[2].partition("\n## ")[0]
    (steps,) = fenced(section, "sh")
    assert "make docs" in steps


@pytest.mark.parametrize("page", PAGES)
class TestPointers:
    """What a page names must be there."""

    def test_links(self, page, root):
        targets = re.findall(r"\]\(([^)#]+)\)", (root / page).read_text())
        assert not [t for t in targets if "://" not in t and not (root / page).parent.joinpath(t).exists()]

    def test_paths(self, page, root):
        text = (root / page).read_text()
        paths = re.findall(r"(?<![\w/.])(?:kvscout|tests|docs|requirements)/[\w./-]*\w", text)
        assert not [path for path in paths if not (root / path).exists()]

    def test_make_targets(self, page, root):
        named = {name for line in code(root / page) for name in re.findall(r"\bmake ([a-z-]+)", line)}
        targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
        assert named <= targets

    def test_commands(self, page, root):
        named = {name for line in code(root / page) for name in re.findall(r"(?:^|-m )kvscout ([a-z]+)", line)}
        assert named <= set(commands())

    def test_names_of_the_package(self, page, root):
        for dotted in re.findall(r"\bkvscout(?:\.\w+)+", (root / page).read_text()):
            # Modules are imported on the way to a name; a member of what is no module is not looked at.
            names = dotted.split(".")
            pkgutil.resolve_name(".".join(names[: 4 if names[1] == "integrations" else 3]))


def code(page):
    """Lines of shell blocks without their comments, and what stands between single backticks."""
    text = page.read_text()
    lines = [line.partition("#")[0] for block in fenced(text, "sh") for line in block.splitlines()]
    return lines + re.findall(r"(?<!`)`([^`\n]+)`", text)
