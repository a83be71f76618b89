"""The tables that a row attends through, and what it sees through them."""

import pytest
import torch

from kvscout.demo import engine as engine_module
from kvscout.demo.caches import PAGE
from kvscout.demo.engine import page_scores


def attentions(engine):
    return [attention for history in engine.history for attention in history.attentions]


def outputs(engine, layer):
    """Output of every token in a layer."""
    return torch.cat([attention.output for attention in engine.history[layer].attentions])


def selected_pages(engine, attention):
    """Pages of each row's table, as lists, the newest last."""
    page_of_block = engine.block_of_page.argsort()
    counts = (attention.chosen + 1).tolist()
    return [page_of_block[row[:count]].tolist() for row, count in zip(attention.block_tables, counts, strict=True)]


def test_tables_hold_distinct_earlier_pages_and_end_with_the_newest(finish):
    engine = finish().engine
    for attention in attentions(engine):
        for position, pages in zip(attention.positions.tolist(), selected_pages(engine, attention), strict=True):
            assert pages[-1] == position // PAGE
            assert len(set(pages)) == len(pages) == min(4, position // PAGE + 1)
            assert max(pages) == pages[-1]


def test_lengths_count_whole_pages_and_the_part_of_the_newest(finish):
    for attention in attentions(finish().engine):
        for position, length in zip(attention.positions.tolist(), attention.lengths.tolist(), strict=True):
            assert length == min(3, position // PAGE) * PAGE + position % PAGE + 1


def test_scores_are_those_of_the_unquantised_indexer(finish):
    """But for what e4m3 loses; of the last token in the last layer, whose scores are still there."""
    engine = finish().engine
    last, keys = attentions(engine)[-1], torch.cat([index_k for _, _, index_k in engine.history[-1].written])
    scores = last.index_weights[0] @ (last.index_q[0] @ keys.T).relu()
    assert 1e-3 < (engine.logits[0, : len(keys)] - scores).norm() / scores.norm() < 0.1


def test_best_pages_are_selected(finish):
    """The last scores that the engine made, of its last token and layer, and the pages that were selected by them."""
    engine = finish().engine
    last = attentions(engine)[-1]
    full = int(last.full_pages)
    best = page_scores(engine.logits[:1])[0, :full].topk(3).indices
    assert set(selected_pages(engine, last)[0]) == {*best.tolist(), full}
    assert full > 3


def test_pages_are_strewn_over_the_pool(finish):
    assert finish().engine.block_of_page.tolist() != list(range(8))


def test_all_pages_selected_is_dense_attention(finish):
    """Against torch's attention over the keys and values that were written, within what e4m3 loses of them."""
    engine = finish(top_pages=8).engine
    for layer in range(2):
        k, v, _ = (torch.cat(parts) for parts in zip(*engine.history[layer].written, strict=True))
        q = torch.cat([attention.q for attention in engine.history[layer].attentions])
        q, k, v = (part.float().transpose(0, 1)[None] for part in (q, k, v))
        dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]
        dense, output = dense.transpose(0, 1).flatten(1), outputs(engine, layer).float().flatten(1)
        error = (output - dense).norm(dim=1) / dense.norm(dim=1)
        assert 1e-3 < error.max() < 8e-2


def test_no_row_sees_a_later_one(finish, prompt):
    """Rows of one chunk are written together, so a row's own page holds tokens that it must not see."""
    first, second = finish(), finish(prompt[:-1] + b"!")
    for layer in range(2):
        one, other = (job.engine.history[layer].attentions[0].output for job in (first, second))
        assert len(one) == len(prompt)
        assert torch.equal(one[:-1], other[:-1])
        assert not torch.equal(one[-1], other[-1])


def test_chunks_of_a_prefill_do_not_matter(finish, monkeypatch):
    whole = finish(top_pages=8)
    monkeypatch.setattr(engine_module, "CHUNK", 7)
    monkeypatch.setattr("kvscout.demo.job.CHUNK", 7)
    parts = finish(top_pages=8)
    assert len(attentions(parts.engine)) > len(attentions(whole.engine))
    one, other = (outputs(job.engine, 1)[: job.prompt_tokens].float() for job in (whole, parts))
    # A float32 sum in another order may round an e4m3 number to its neighbour.
    assert (one - other).norm() / one.norm() < 2e-2


@pytest.mark.parametrize(("rows", "first", "stride"), [(10, 10, 11), (1, 109, 110), (1000, 0, 1)])
def test_rows_that_are_kept(finish, rows, first, stride):
    engine = finish(prompt_rows=rows).engine
    for history in engine.history:
        kept = torch.cat([attention.positions for attention in history.attentions]).tolist()
        assert kept == [*range(first, 110, stride), *range(110, 115)]
        assert sum(len(keys) for keys, _, _ in history.written) == 115


def test_keeping_fewer_rows_changes_none(finish):
    every, some = finish(), finish(prompt_rows=10)
    one, other = (job.engine.history[1].attentions[0] for job in (every, some))
    for whole, part in zip(one, other, strict=True):
        assert torch.equal(whole[other.positions], part)


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1])
def test_short_prompts(finish, prompt, length):
    job = finish(prompt[:length], steps=2, top_pages=2)
    assert job.prompt_tokens == length
    assert all(attention.output.isfinite().all() for attention in attentions(job.engine))


@pytest.mark.gpu
def test_decode_never_waits_for_the_gpu(decoder, finish, prompt):
    engine = finish().engine
    token = torch.zeros(1, dtype=torch.long, device=decoder.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.forward(token, len(prompt) + 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
