"""Which texts a step learns from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.distillation.divergences import TargetRows
from tandem.distillation.drafters import read_model, read_tokenizer
from tandem.distillation.held_out import HeldOut
from tandem.distillation.plan import Distillation
from tandem.distillation.teachers import KnownTexts, LocalTeacher, Teacher, continue_rows
from tandem.distillation.texts import Record, read_records
from tandem.distillation.training_texts import TrainingTexts, counted

CPU = torch.device("cpu")


class Counting(Teacher):
    """Writes each text's number after its prompt, and counts what it is asked."""

    def __init__(self) -> None:
        self.vocabulary, self.asked, self.ends = 2048, 0, [0]

    def rows(self, tokens: Tensor, last: int = 0, known: KnownTexts | None = None) -> TargetRows:
        raise AssertionError("nobody asked")

    def continued(
        self, tokens: Tensor, known: Tensor, vocabulary: int, seed: int
    ) -> tuple[Tensor, TargetRows]:
        self.asked += 1
        place = torch.arange(tokens.shape[1])
        number = torch.arange(len(tokens))[:, None] + 1
        written = torch.where(place < known[:, None], tokens, 100 * self.asked + number)
        ids = written[:, 1:, None]
        return written, TargetRows(-ids.float(), ids)


@pytest.fixture
def records(plan: Distillation) -> list[Record]:
    return read_records(Path(plan.prompts), read_tokenizer(plan.target))


def tokens_of(batches: TrainingTexts, step: int, drafter: Any = None) -> Tensor:
    return torch.cat([batch.tokens for batch in batches.of(step, drafter)])


def test_places_count_from_the_prompts_last_token_to_the_end_of_the_text() -> None:
    tokens = torch.tensor([[5, 6, 7, 8, 0, 9, 9], [0, 6, 0, 8, 8, 8, 8], [5, 6, 7, 8, 9, 9, 9]])
    found = counted(tokens, torch.tensor([2, 1, 3]), [0]).int().tolist()
    assert found == [[0, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1]]
    assert counted(tokens, torch.tensor([2, 1, 3]), []).sum() == 5 + 6 + 4


def test_each_text_of_the_target_is_learnt_from_as_often_and_written_once(
    plan: Distillation, records: list[Record], tmp_path: Path
) -> None:
    teacher = Counting()
    batches = TrainingTexts(replace(plan, data="target"), records, teacher, 2048, tmp_path)
    seen = torch.cat([tokens_of(batches, step)[:, -1] for step in range(16)])
    assert teacher.asked == 2  # two parts of a block of 16
    assert set(seen.bincount().tolist()) == {0, 4}
    assert (seen.bincount() == 4).sum() == 16
    batches.of(16, None)
    assert teacher.asked == 4
    batches.of(32, None)
    assert sorted(path.name for path in (tmp_path / "texts").iterdir()) == ["00001", "00002"]


def test_a_run_that_was_cut_in_a_new_block_has_the_one_before(
    plan: Distillation, records: list[Record], tmp_path: Path
) -> None:
    """Its checkpoint is of a step before: nothing is written a second time."""

    class Cut(Counting):
        def continued(
            self, tokens: Tensor, known: Tensor, vocabulary: int, seed: int
        ) -> tuple[Tensor, TargetRows]:
            if self.asked == 3:
                raise KeyboardInterrupt
            return super().continued(tokens, known, vocabulary, seed)

    own = replace(plan, data="target")
    cut = TrainingTexts(own, records, Cut(), 2048, tmp_path)
    cut.of(15, None)
    with pytest.raises(KeyboardInterrupt):
        cut.of(16, None)
    teacher = Counting()
    again = TrainingTexts(own, records, teacher, 2048, tmp_path)
    for step in (14, 15, 16):
        again.of(step, None)
    assert teacher.asked == 1  # the second part of the second block


def test_what_the_target_wrote_is_there_after_a_restart(
    plan: Distillation, records: list[Record], tmp_path: Path
) -> None:
    made = []
    for _ in range(2):
        teacher = Counting()
        batches = TrainingTexts(replace(plan, data="target"), records, teacher, 2048, tmp_path)
        (batch,) = batches.of(3, None)
        assert batch.said is not None
        assert batch.said.ids is not None
        assert torch.equal(batch.said.ids[..., 0], batch.tokens[:, 1:])
        assert torch.equal(batch.said.log_probs[..., 0], -batch.tokens[:, 1:].float())
        made.append((batch.tokens, teacher.asked))
    assert torch.equal(made[0][0], made[1][0])
    assert [asked for _, asked in made] == [2, 0]


def test_mixed_texts_are_half_the_drafters_own(
    plan: Distillation, records: list[Record], tmp_path: Path
) -> None:
    drafter = read_model(plan.drafter, torch.float32, CPU)
    for rows in (1, 4, 5):
        own_plan = replace(plan, data="mixed", rows=rows)
        batches = TrainingTexts(own_plan, records, Counting(), 2048, tmp_path)
        own, *targets = batches.of(1, drafter)
        assert own.said is None
        assert [len(batch.tokens) for batch in (own, *targets)] == {
            1: [1],
            4: [2, 2],
            5: [3, 2],
        }[rows]
        for batch in targets:
            assert batch.said is not None
            assert batch.counts.shape == (2, 12)


def test_its_own_texts_are_drawn_anew_with_its_weights_of_the_step(
    plan: Distillation, records: list[Record], tmp_path: Path
) -> None:
    batches = TrainingTexts(replace(plan, data="on-policy"), records, Counting(), 2048, tmp_path)
    drafter = read_model(plan.drafter, torch.float32, CPU)
    first = tokens_of(batches, 0, drafter)
    assert torch.equal(tokens_of(batches, 0, drafter), first)
    assert not torch.equal(tokens_of(batches, 1, drafter), first)
    with torch.no_grad():
        drafter.get_input_embeddings().weight.mul_(3)
    assert not torch.equal(tokens_of(batches, 0, drafter), first)


def test_a_continuation_follows_the_models_law(plan: Distillation) -> None:
    """Of one token after prompts of several lengths, drawn and likeliest."""
    model = read_model(plan.target, torch.float32, CPU)
    tokens = torch.tensor([[3, 4, 5, 0], [3, 0, 0, 0]]).repeat_interleave(1500, 0)
    known = torch.tensor([3, 1]).repeat_interleave(1500)
    filled = continue_rows(model, tokens, known, 6, torch.Generator().manual_seed(0))
    assert torch.equal(filled[:1500, :3], tokens[:1500, :3])
    for rows, prompt in ((filled[:1500, 3], [3, 4, 5]), (filled[1500:, 1], [3])):
        law = model(input_ids=torch.tensor([prompt])).logits[0, -1, :6].softmax(-1)
        seen = rows.bincount(minlength=6) / 1500
        assert float((seen - law.detach()).abs().max()) < 0.05
    best = continue_rows(model, tokens[:1], known[:1], 2048, None)
    likeliest = model(input_ids=tokens[:1, :3]).logits[0, -1].argmax()
    assert best[0, 3] == likeliest


def test_a_round_of_a_drafter_that_is_its_target_emits_all(
    plan: Distillation, records: list[Record], tmp_path: Path
) -> None:
    model = read_model(plan.target, torch.float32, CPU)
    held = HeldOut(plan, records, LocalTeacher(model, CPU), 2048, tmp_path)
    for temperature in (0, 1):
        assert held.tokens_a_round(model, temperature) == pytest.approx([5.0] * 4, abs=1e-4)
    for figures in held.measure(model).values():
        assert figures.overlap == pytest.approx([1.0] * len(figures.overlap), abs=1e-5)
        assert figures.agreement == pytest.approx([1.0] * len(figures.agreement))


def test_a_rounds_tokens_are_what_the_rule_accepts(
    plan: Distillation, records: list[Record], tmp_path: Path
) -> None:
    """Against rounds that are drawn and judged one by one."""
    target, drafter = (read_model(plan.target, torch.float32, CPU) for _ in range(2))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():  # near, else nothing is accepted
        table = drafter.get_input_embeddings().weight
        table += 0.05 * torch.randn(table.shape, generator=generator)
    found = []
    for seed in range(16):
        own = replace(plan, seed=seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tandem.distillation.held_out._DRAFTS", 1)  # after four tokens
            held = HeldOut(own, records, LocalTeacher(target, CPU), 2048, tmp_path)
            found += held.tokens_a_round(drafter, 1)
    expected = sum(found) / len(found)
    assert 1.5 < expected < 4.5
    generator = torch.Generator().manual_seed(5)
    batch, emitted, rounds = held.texts["target"], 0, 0
    for row in batch.tokens[:, :4]:
        for _ in range(40):
            known = torch.tensor([4])
            room = torch.cat([row, torch.zeros(4).long()])[None]
            drafted = continue_rows(drafter, room, known, 2048, generator)
            p, q = (m(input_ids=drafted).logits[0, 3:7].softmax(-1) for m in (target, drafter))
            rounds += 1
            emitted += 1
            for place, token in enumerate(drafted[0, 4:]):
                ratio = (p[place, token] / q[place, token]).item()
                if torch.rand(1, generator=generator).item() >= ratio:
                    break
                emitted += 1
    assert emitted / rounds == pytest.approx(expected, abs=0.35)


def test_samples_of_a_local_target_are_seeded(plan: Distillation) -> None:
    teacher: Any = LocalTeacher(read_model(plan.target, torch.float32, CPU), CPU)
    tokens, known = torch.full((3, 9), 7), torch.tensor([2, 3, 4])
    one, same, other = (teacher.continued(tokens, known, 2048, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_target_says_while_it_writes_what_it_says_of_the_text(plan: Distillation) -> None:
    teacher = LocalTeacher(read_model(plan.target, torch.float32, CPU), CPU)
    written, said = teacher.continued(torch.full((3, 9), 7), torch.tensor([2, 3, 4]), 2048, 1)
    values, ids = teacher.rows(written).log_probs.topk(64)
    assert said.ids is not None
    for row, known in enumerate((2, 3, 4)):
        assert torch.allclose(said.log_probs[row, known - 1 :], values[row, known - 1 :], atol=1e-4)
        same = said.ids[row, known - 1 :] == ids[row, known - 1 :]
        assert float(same.float().mean()) > 0.99


def test_texts_that_begin_alike_are_computed_once(
    plan: Distillation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ever more of two texts, with other tokens after it each time; then from the beginning."""
    model = read_model(plan.target, torch.float32, CPU)
    teacher, known, fed = LocalTeacher(model, CPU), KnownTexts(), []
    forward = model.forward

    def counted_forward(input_ids: Tensor, **options: Any) -> Any:
        fed.append(input_ids.shape[1])
        return forward(input_ids=input_ids, **options)

    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(2048, (2, 20), generator=generator)
    for size in (3, 9, 20, 9):
        behind = torch.randint(2048, (2, 4), generator=generator)
        tokens = torch.cat([texts[:, :size], behind], 1)
        expected = teacher.rows(tokens).log_probs[:, -4:]
        with monkeypatch.context() as patch:
            patch.setattr(model, "forward", counted_forward)
            found = teacher.rows(tokens, 4, known).log_probs
        assert torch.allclose(found, expected, atol=1e-4)
    assert fed == [6, 9, 14, 4]
