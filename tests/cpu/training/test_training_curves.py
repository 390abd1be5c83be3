"""Thinned logs and the picture of the losses."""

from pathlib import Path

from training.curves import LOGS, PICTURE, READERS, picture, read, thinned


def test_the_committed_picture_is_that_of_the_committed_logs() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture([(name, read(LOGS / f"{name}.jsonl")) for name in READERS])


def test_thinning_loses_no_step_and_keeps_means() -> None:
    options = {"name": "reader-v4", "state": Path("/x").as_posix(), "stages": None, "seed": 0}
    common = {"document_loss": 1.0, "index_loss": 0.5, "tokens_s": 100, "waited": 0.0}
    records: list[dict[str, object]] = [{"event": "start", "options": options}, {"event": "stage", "stage": 0}]
    for step in range(20, 220, 20):
        for length, loss in ((512, 2.0), (1024, step / 100)):
            own = {"length": length, "steps": 10, "answer_loss": loss, "exact": 0.25, "answers": 8}
            records.append(
                {"step": step, "seconds": 1.0 * step, "tokens": step, "stage": 0, "lr": 0.1, **own, **common}
            )
    records.append({"event": "stop"})
    made = list(thinned(records))
    assert made[0] == {"event": "start", "options": {"name": "reader-v4", "seed": 0}}
    assert made[-1] == {"event": "stop"}
    for length, loss in ((512, 2.0), (1024, 1.1)):
        own = [record for record in made if record.get("length") == length]
        assert [record["steps"] for record in own] == [60, 40]
        assert sum(int(str(record["answers"])) for record in own) == 80
        assert all(record["exact"] == 0.25 for record in own)
        assert sum(float(str(r["answer_loss"])) * int(str(r["steps"])) for r in own) / 100 == loss
