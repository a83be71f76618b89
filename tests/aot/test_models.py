"""What describes a model: the presets, and JSON files of the same form."""

import json
import re

import pytest

from kvscout.aot import models


def test_a_preset_says_what_its_makers_publish():
    assert set(models.MODELS) == {"deepseek-v3.2", "deepseek-v4", "glm-5", "minimax-m3"}
    scores = {name: model.score and (model.score.heads, model.score.head_dim) for name, model in models.MODELS.items()}
    assert scores == {"deepseek-v3.2": (64, 128), "deepseek-v4": (64, 128), "glm-5": (32, 128), "minimax-m3": None}
    assert {name: model.select.k for name, model in models.MODELS.items()} == {
        "deepseek-v3.2": 2048,
        "deepseek-v4": 512,
        "glm-5": 2048,
        "minimax-m3": 16,
    }


def test_the_page_shows_them_and_a_file_that_can_be_read(root, tmp_path):
    page = (root / "docs" / "prebuilt-kernels.md").read_text()
    assert re.findall(r"^\| `([\w.-]+)` \|", page, re.MULTILINE) == list(models.MODELS)
    path = tmp_path / "models.json"
    path.write_text(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])
    assert models.read(path)["mine"].attend.scales == ("head",)


def test_a_file_has_the_form_of_the_presets(tmp_path):
    path = tmp_path / "models.json"
    path.write_text(
        '{"a": {"score": {"heads": 8, "head_dim": 64, "rows": 3, "keys": [5, 6], "q_scale": [true, false]}}}'
    )
    assert models.read(path) == {"a": models.Model(score=models.Score(8, 64, (3,), (5, 6), q_scale=(True, False)))}


def test_null_is_a_bound_that_is_not_given(tmp_path):
    path = tmp_path / "models.json"
    attend = {"query_heads": 8, "kv_heads": 1, "head_dim": 64, "pages": 16, "max_context_length": [None, 4096]}
    path.write_text(json.dumps({"a": {"attend": attend | {"max_partitions": None, "tile": 128}}}))
    read = models.read(path)["a"].attend
    assert (read.pages, read.max_context_length, read.max_partitions) == ((16,), (None, 4096), None)
    assert read.tile == 128
    path.write_text(json.dumps({"a": {"attend": attend | {"tile": None}}}))
    assert models.read(path)["a"].attend.tile is None


ATTEND = {"query_heads": 8, "kv_heads": 1, "head_dim": 64, "pages": 16}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nope", "is not JSON: Expecting value"),
        ([], "expected an object of at least one model by its name, got list"),
        ({}, "expected an object of at least one model by its name, got dict"),
        ({"a": 5}, ": a: expected an object, got int 5"),
        ({"a": {}}, ": a: expected at least one of score, select, attend"),
        ({"a": {"scores": {}}}, ": a: there is no 'scores'; there are score, select, attend"),
        ({"a": {"score": {"heads": 64}}}, ": a: score: 'head_dim' is missing"),
        (
            {"a": {"score": {"heads": 3, "head_dim": 64}}},
            ": a: score: heads: expected one of 8, 16, 32, 64, 128, got 3",
        ),
        ({"a": {"select": {"k": True}}}, ": a: select: k: expected a whole number, got bool True"),
        ({"a": {"select": {"k": 0}}}, ": a: select: k: expected a whole number from 1 to 2147483647, got 0"),
        ({"a": {"select": {"k": 1, "rows": []}}}, ": a: select: rows: expected at least one value, got an empty list"),
        ({"a": {"select": {"k": 1, "rows": [1, "2"]}}}, ": a: select: rows: expected a whole number, got str '2'"),
        ({"a": {"attend": ATTEND | {"pages": 24}}}, ": a: attend: pages: expected one of 16, 32, 64, 128, got 24"),
        ({"a": {"attend": ATTEND | {"caches": "fp8"}}}, ": a: attend: caches: expected one of e4m3, bfloat16, "),
        ({"a": {"attend": ATTEND | {"causal": 1}}}, ": a: attend: causal: expected true or false, got int 1"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path, content, message):
    path = tmp_path / "models.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(models.WrongModel) as raised:
        models.read(path)
    assert message in str(raised.value)


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(models.WrongModel, match=r"cannot read .*nothing.json': No such file"):
        models.read(tmp_path / "nothing.json")
