"""The whole gate against a server without a model: what passes, what fails, and what must stay open."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest
from toy_server import Toy

from longread.measure.gate import documents, judging, record
from longread.measure.gate.abilities import capacity_of, probe, read_models, read_prompt_logprobs
from longread.measure.gate.client import Allowance, Client, number, read_answer
from longread.measure.gate.errors import GateError, MalformedError, RefusedError, SpentError, UnreachableError
from longread.measure.gate.profiles import LIMITS, built_in, profile_of
from longread.measure.gate.report import findings_table, limits_reasons, limits_table, told
from longread.measure.gate.run import Outcome, Settings, Watch, compare_files, make_base, run_gate
from longread.measure.gate.verdict import LevelResult
from longread.spec.errors import ConfigError

URL = "http://toy"
LENGTHS, DOCUMENTS = (512, 768), 8


def settings(**more: Any) -> Settings:
    return Settings(
        URL,
        **({"lengths": LENGTHS, "documents": DOCUMENTS, "style": "plain", "pressure_tokens": 2048, "fresh": 1} | more),
    )


def base_of(toy: Toy, **more: Any) -> record.Sayings:
    return asyncio.run(make_base(settings(**more), None, Watch(), toy.transport()))


@pytest.fixture(scope="module")
def base() -> record.Sayings:
    return base_of(Toy())


def gate(
    toy: Toy, base: record.Sayings | None, profile: str = "lossless", watch: Watch | None = None, **more: Any
) -> Outcome:
    more = {"levels": (1, 2, 3, 4)} | more
    return asyncio.run(run_gate(settings(**more), built_in(profile), base, watch or Watch(), toy.transport()))


def level(outcome: Outcome, number: int) -> LevelResult:
    return next(one for one in outcome.levels if one.level == number)


def verdicts(outcome: Outcome) -> dict[int, str]:
    return {one.level: one.verdict for one in outcome.levels}


def test_the_same_server_passes_likelihood_and_critical_values() -> None:
    base = base_of(Toy(), documents=9)  # whose answers are words at random: of 90 probes some name no value
    outcome = gate(Toy(), base)
    assert base.complete and verdicts(outcome)[1] == "PASS" and verdicts(outcome)[4] == "PASS"
    kl = [f for f in level(outcome, 1).findings if f.name.startswith("kl_mean at")]
    assert [f.name for f in kl] == ["kl_mean at 512", "kl_mean at 768"] and all(f.value == 0 for f in kl)
    needle = next(f for f in level(outcome, 2).findings if f.name == "needle_drop")
    assert (needle.value, needle.verdict) == (0, "INCONCLUSIVE") and "too little to lose" in needle.note


def test_noise_fails_the_strict_profile_first(base: record.Sayings) -> None:
    noisy = gate(Toy(noise=0.3), base, levels=(1,))
    assert noisy.verdict == "FAIL"
    small = gate(Toy(noise=0.02), base, "int4-class", levels=(1,))
    assert small.verdict == "PASS"
    failed = {f.name for f in level(noisy, 1).findings if f.verdict == "FAIL"}
    assert {"kl_mean at 512", "kl_mean at 768"} <= failed


def test_the_candidate_is_led_along_the_base_behind_a_difference(base: record.Sayings) -> None:
    toy = Toy(noise=0.6)
    found: list[Any] = []
    gate(toy, base, watch=Watch(found.append), levels=(1,))
    before = base.by_key()
    led = [one for one in found if one.get("forced")]
    assert led
    for one in led:
        other = before[one["key"]]
        assert len(one["forced"]) == len(other.positions) - one["forced_from"]
        assert [row[0] for row in one["forced"]] == [row[0] for row in other.positions[one["forced_from"] :]]
    assert any(isinstance(body.get("prompt"), list) for body in toy.requests)


def test_prompt_logprobs_give_the_same_distributions_in_one_request(base: record.Sayings) -> None:
    def forced(toy: Toy) -> dict[str, Any]:
        found: list[Any] = []
        gate(toy, base, watch=Watch(found.append), levels=(1,))
        return {one["key"]: one["forced"] for one in found if one.get("forced")}

    step, once = Toy(noise=0.6), Toy(noise=0.6, prompt_logprobs=True)
    one, other = forced(step), forced(once)
    assert one and one.keys() == other.keys()
    for key, rows in one.items():
        ids = min(len(rows), len(other[key]))
        assert ids and [row[2][:3] for row in rows[:ids]] == [row[2][:3] for row in other[key][:ids]]
    assert len(once.requests) < len(step.requests)


def test_one_changed_value_fails_whatever_the_mean_says(base: record.Sayings) -> None:
    outcome = gate(Toy(wrong_every=60), base, "int4-class", levels=(1, 4))
    assert verdicts(outcome)[4] == "FAIL"
    note = next(f.note for f in level(outcome, 4).findings if f.name == "critical_changes")
    assert "99 day" in note


def test_it_stops_when_decided(base: record.Sayings) -> None:
    broken, sound = Toy(noise=2.0), Toy()
    outcome = gate(broken, base, levels=(1,))
    assert outcome.verdict == "FAIL" and outcome.decided_after is not None and outcome.decided_after < DOCUMENTS
    assert len(broken.requests) < len(base.said) * 3
    assert gate(sound, base, levels=(1,)).verdict == "PASS"


def test_a_failure_tells_how_many_samples_would_have_been_enough(base: record.Sayings) -> None:
    strong, weak = (
        next(f for f in level(gate(Toy(noise=noise), base, levels=(1,)), 1).findings if f.name == "kl_mean at 512")
        for noise in (1.0, 0.05)
    )
    assert strong.verdict == weak.verdict == "FAIL" and strong.needed and weak.needed
    assert 2 <= strong.needed <= 20
    changed = gate(Toy(wrong_every=20), base, "int4-class", levels=(4,))
    found = next(f for f in level(changed, 4).findings if f.name == "critical_changes")
    assert found.needed == math.ceil(math.log(0.2) / math.log(1 - (found.value or 0) / found.samples))


def test_general_models_are_told_how_to_answer_and_asked_for_critical_values() -> None:
    toy = Toy()
    mine = base_of(toy, style="instructed", documents=3)
    kinds = {one.kind for one in mine.said}
    assert {"copy", "party", "dose", "negation", "unit", "name", "single", "absent", "text"} <= kinds
    assert all(one.levels == (1, 3) for one in mine.said if one.kind == "copy")
    roles = [[m["role"] for m in body["messages"]] for body in toy.requests if "messages" in body]
    assert ["system", "user"] in roles
    outcome = gate(Toy(), mine, style="instructed", documents=3)
    assert not [f for one in outcome.levels for f in one.findings if f.verdict == "FAIL"]
    told_kinds = {f.name for f in level(outcome, 4).findings}
    assert {"asked: party", "asked: number", "asked: negation", "asked: name"} <= told_kinds


def test_no_base_leaves_likelihood_open_and_judges_the_truth() -> None:
    outcome = gate(Toy(), None)
    assert level(outcome, 1).not_run is not None and "base" in (level(outcome, 1).not_run or "")
    assert verdicts(outcome)[2] == "FAIL" and verdicts(outcome)[4] == "FAIL"  # the toy knows nothing


@pytest.mark.parametrize("hidden", ["logprobs", "completions", "ids"])
def test_what_a_server_cannot_do_is_said_and_never_passes_for_done(base: record.Sayings, hidden: str) -> None:
    outcome = gate(Toy(hidden=frozenset([hidden])), base, levels=(0, 1))
    if hidden == "logprobs":
        assert "no log-probabilities" in (level(outcome, 1).not_run or "")
    if hidden != "ids":
        assert verdicts(outcome)[0] == "INCONCLUSIVE" and outcome.verdict == "INCONCLUSIVE"
        assert any("not run" in f.note for f in level(outcome, 0).findings)
    else:
        assert verdicts(outcome)[1] == "PASS"


def exact(toy: Toy, **more: Any) -> LevelResult:
    return level(gate(toy, None, levels=(0,), **more), 0)


def test_exactness_passes_a_sound_server_in_every_situation() -> None:
    found: list[Any] = []
    outcome = gate(Toy(), None, watch=Watch(found.append), levels=(0,))
    assert outcome.verdict == "PASS", level(outcome, 0).findings
    names = {one["name"] for one in found}
    assert {"cold = warm", "another question in between", "whole = stream", "alone = beside others"} <= names
    assert {"after pressure on the cache", "gone on = read at once", "warm behind a question = cold"} <= names


def test_exactness_catches_a_stale_hit_and_an_ignored_temperature() -> None:
    stale = exact(Toy(stale=True))
    assert stale.verdict == "FAIL"
    assert next(f for f in stale.findings if f.name.startswith("same answer")).note.startswith("cold = warm")
    hot = exact(Toy(heat=1.0))
    assert {f.name: f.verdict for f in hot.findings}["temperature 0.5"] == "FAIL"
    assert {f.name: f.verdict for f in hot.findings}["temperature 1"] == "PASS"
    cold = exact(Toy(heat=0.001))
    assert {f.name: f.verdict for f in cold.findings}["temperature 1"] == "FAIL"


def test_seeds_that_are_taken_and_ignored_fail() -> None:
    class Ignoring(Toy):
        def handle(self, request: httpx.Request) -> httpx.Response:
            body = json.loads(request.content) if request.content else {}
            body.pop("seed", None)
            return super().handle(httpx.Request(request.method, request.url, json=body))

    assert {f.name: f.verdict for f in exact(Ignoring()).findings}["a seed repeats"] == "FAIL"


def test_a_reuse_that_nobody_saw_is_noted() -> None:
    assert any("cached_tokens" in note for note in exact(Toy(hidden=frozenset(["cached"]))).notes)
    assert any("cache_salt" in note for note in exact(Toy(hidden=frozenset(["salt"]))).notes)


def test_requests_that_fail_leave_the_level_open(base: record.Sayings) -> None:
    outcome = gate(Toy(broken_every=37), base, levels=(1, 4))
    assert verdicts(outcome) == {1: "INCONCLUSIVE", 4: "INCONCLUSIVE"}
    assert any(f.name == "requests that failed" and "500" in f.note for f in level(outcome, 1).findings)
    with pytest.raises(RefusedError, match="500"):
        gate(Toy(broken_every=1), base)


def test_the_end_of_the_allowance_keeps_what_was_measured(base: record.Sayings) -> None:
    outcome = gate(Toy(), base, max_requests=60, levels=(1,))
    assert outcome.stopped is not None and "--max-requests" in outcome.stopped
    assert outcome.verdict == "INCONCLUSIVE" and outcome.provenance["requests"] == 60
    part = base_of(Toy(), max_requests=60)
    assert not part.complete and 0 < len(part.said) < len(base.said)


def test_an_interruption_keeps_what_was_measured(base: record.Sayings) -> None:
    async def interrupted() -> Outcome:
        said: list[object] = []
        work = asyncio.current_task()

        def keep(one: object) -> None:
            said.append(one)
            if len(said) == 40 and work is not None:
                work.cancel()

        return await run_gate(settings(levels=(1,)), built_in("lossless"), base, Watch(keep), Toy().transport())

    outcome = asyncio.run(interrupted())
    assert outcome.interrupted and outcome.verdict == "INCONCLUSIVE" and level(outcome, 1).findings


def test_files_are_compared_without_a_server(base: record.Sayings, tmp_path: Path) -> None:
    base.write(tmp_path / "base.json")
    again = record.read(tmp_path / "base.json")
    assert again.plan == base.plan and again.said == base.said and again.complete
    other = asyncio.run(make_base(settings(), again, Watch(), Toy(noise=0.5).transport()))
    assert compare_files(again, other, built_in("lossless")).verdict == "FAIL"
    assert verdicts(compare_files(again, again, built_in("lossless")))[1] == "PASS"
    with pytest.raises(ConfigError, match="different plans"):
        compare_files(again, base_of(Toy(), documents=1), built_in("lossless"))


def own(path: Path, rows: list[dict[str, Any]]) -> documents.Own:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return documents.read_own(path)


def test_the_users_own_asks_are_scored_by_their_references(tmp_path: Path) -> None:
    said = asyncio.run(answer_of("What is it?"))
    rows: list[dict[str, Any]] = [
        {"prompt": "A text to go on", "max_tokens": 4, "key": "text"},
        {
            "messages": [{"role": "user", "content": "What is it?"}],
            "expected": {"kind": "exact", "text": said},
            "key": "right",
        },
        {
            "messages": [{"role": "user", "content": "And this?"}],
            "expected": {"kind": "contains", "text": "???"},
            "key": "wrong",
        },
        {
            "messages": [{"role": "user", "content": "How much?"}],
            "expected": {"kind": "critical", "text": "5 mg", "critical": ["5 mg"]},
            "key": "dose",
        },
    ]
    asks = own(tmp_path / "own.jsonl", rows)
    mine = base_of(Toy(), own=asks, documents=3)
    found = {one.key.partition("/")[2]: one for one in mine.said if one.paper.startswith("own-")}
    assert set(found) == {"text", "right", "wrong", "dose"}
    assert judging.right(found["right"]) and judging.matches(found["right"]) and not judging.right(found["wrong"])
    assert found["text"].levels == (1,) and found["dose"].levels == (1, 3, 4) and found["text"].positions
    again = gate(Toy(), mine, own=asks, documents=3)
    assert verdicts(again)[1] != "FAIL" and any("own asks" in f.name for f in level(again, 1).findings)
    with pytest.raises(ConfigError, match="--asks of sha256"):
        gate(Toy(), mine, documents=3)
    other = own(tmp_path / "other.jsonl", [{"prompt": "Another", "key": "x"}])
    with pytest.raises(ConfigError, match="--asks of sha256"):
        gate(Toy(), mine, own=other, documents=3)


async def answer_of(question: str) -> str:
    async with Client(URL, Allowance(9, 60.0), transport=Toy().transport()) as client:
        messages = ({"role": "user", "content": question},)
        return (await client.chat(messages, max_tokens=128, temperature=0)).text


def test_the_base_knows_its_own_noise_and_lossless_is_judged_by_it(base: record.Sayings) -> None:
    assert base.again and {one.turn for one in base.again} == {0}
    lossless = built_in("lossless")
    assert judging.noise_of(base.by_key(), base.again, lossless) == 0
    assert judging.kl_limit(lossless, 0.0) == lossless["kl_floor"]
    assert judging.kl_limit(lossless, 1e-5) == pytest.approx(1e-4)
    assert judging.kl_limit(lossless, 1.0) == judging.kl_limit(lossless, None) == lossless["kl_mean"]
    assert judging.kl_limit(built_in("fp8-class"), 0.0) == built_in("fp8-class")["kl_mean"]
    # Far below what the fixed limit sees, and far above this server's own noise, which is none.
    small = gate(Toy(noise=0.005), base, levels=(1,))
    values = [f.value or 0 for f in level(small, 1).findings if f.name.startswith("kl_mean at")]
    assert small.verdict == "FAIL" and max(values) < lossless["kl_mean"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(kind="x"), "is no base"),
        (lambda d: d.update(schema=99), "another version"),
        (lambda d: d["plan"]["papers"][0].update(lines=-1), "damaged at plan.papers.0.lines"),
        (lambda d: d["said"][0].update(key=5), "damaged at said.0.key"),
        (lambda d: d["said"][0].update(surplus=5), "damaged at said.0.surplus"),
        (lambda d: d["said"][0].update(positions=[["a", 3.0, []]]), "damaged at said.0.positions"),
    ],
)
def test_a_damaged_file_is_named_and_where(base: record.Sayings, tmp_path: Path, change: Any, says: str) -> None:
    base.write(tmp_path / "b.json")
    data = json.loads((tmp_path / "b.json").read_text())
    change(data)
    (tmp_path / "b.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=says):
        record.read(tmp_path / "b.json")


def test_a_base_of_other_asks_is_refused(base: record.Sayings) -> None:
    said = [base.said[0].model_copy(update={"fingerprint": "0" * 24}), *base.said[1:]]
    with pytest.raises(GateError, match="asked something else"):
        gate(Toy(), record.Sayings({}, base.plan, said, True))


def test_lengths_that_do_not_fit_are_refused_before_any_document(base: record.Sayings) -> None:
    toy = Toy(max_model_len=600)
    with pytest.raises(ConfigError, match=r"768 tokens.*max_model_len is 600"):
        gate(toy, base)
    assert all(len(str(body.get("messages"))) < 200 for body in toy.requests)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"lengths": (100,)}, "not in 512"),
        ({"lengths": (1024, 1024)}, "once"),
        ({"levels": (7,)}, "levels"),
        ({"documents": 0}, "--documents"),
        ({"seconds": float("nan")}, "--budget"),
        ({"concurrency": 10**6}, "--concurrency"),
    ],
)
def test_settings_that_cannot_work_are_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        settings(**more)
    with pytest.raises(ConfigError, match="http"):
        Settings("toy:80")


def ask(handler: Any, allowance: Allowance | None = None) -> Any:
    async def go() -> Any:
        async with Client(URL, allowance or Allowance(20, 60.0), transport=httpx.MockTransport(handler)) as client:
            return await client.chat(({"role": "user", "content": "x"},), max_tokens=1)

    return asyncio.run(go())


def test_a_busy_server_is_asked_again_and_not_for_ever() -> None:
    toy = Toy(busy=2)
    assert ask(toy.handle).text and len(toy.requests) == 3
    with pytest.raises(RefusedError, match="429"):
        ask(Toy(busy=99).handle)
    with pytest.raises(SpentError, match="busy for longer"):
        ask(lambda request: httpx.Response(429, headers={"Retry-After": "20"}, text="x"), Allowance(20, 5.0))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"choices": []}', '{"choices": [5]}', "<html>", '{"choices": [{"logprobs": {"content": [5]}}]}'],
)
def test_answers_of_no_shape_are_refused(text: str) -> None:
    with pytest.raises(MalformedError):
        ask(lambda request: httpx.Response(200, text=text))


def test_a_server_that_is_not_there() -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(UnreachableError, match="refused"):
        ask(gone)


@pytest.mark.parametrize("value", [float("nan"), 1.0, True, "x", None])
def test_log_probabilities_that_are_none(value: object) -> None:
    with pytest.raises(MalformedError):
        number(value)
    assert number(float("-inf")) == -9999.0 and number(1e-6) == 0.0


def test_shapes_of_other_servers() -> None:
    older = {
        "choices": [
            {
                "text": " a",
                "logprobs": {"tokens": [" a"], "token_logprobs": [-0.5], "top_logprobs": [{" a": -0.5, " b": -1}]},
            }
        ]
    }
    assert read_answer(older).positions[0].top == ((" a", -0.5), (" b", -1.0))
    vllm = {"choices": [{"prompt_logprobs": [None, {"5": {"logprob": -0.5, "rank": 1, "decoded_token": " a"}}]}]}
    assert read_prompt_logprobs(vllm) == [{}, {" a": -0.5}]
    assert read_models('{"data": [{"id": "m", "max_model_len": 10}, {"id": "n"}]}') == {"m": 10, "n": None}
    assert capacity_of('vllm:cache_config_info{block_size="16",num_gpu_blocks="100",x="y"} 1') == 1600
    assert capacity_of("") is None and capacity_of('cache_config_info{block_size="16",num_gpu_blocks="None"} 1') is None


def test_abilities_of_the_toy() -> None:
    async def go(toy: Toy) -> Any:
        async with Client(URL, Allowance(50, 60.0), transport=toy.transport()) as client:
            return await probe(client, None)

    found = asyncio.run(go(Toy(prompt_logprobs=True)))
    assert (found.top, found.completion_top, found.ids, found.id_prompts, found.prompt_logprobs) == (
        20,
        20,
        True,
        True,
        True,
    )
    assert found.forces and found.capacity == 4096 and not found.without
    bare = asyncio.run(go(Toy(hidden=frozenset(["logprobs", "completions", "ids", "seed", "salt"]))))
    assert (bare.top, bare.completion_top, bare.forces, bare.seed, bare.salt) == (0, 0, False, False, False)
    assert set(bare.without) == {"logprobs", "seed", "cache_salt", "return_token_ids", "text prompts"}


def test_profiles_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "fp8-class"\n[limits]\nkl_mean = 0.003\n')
    mine = profile_of(str(path))
    assert mine["kl_mean"] == 0.003 and mine["flips"] == built_in("fp8-class")["flips"] and mine.name == "mine"
    for text, says in (
        ('base = "x"', "base must be one of"),
        ('base = "lossless"\n[limits]\nkl_men = 1', "did you mean kl_mean"),
        ('base = "lossless"\n[limits]\nflips = 2', r"0\.\.1"),
        ('base = "lossless"\n[limits]\nflips = nan', r"0\.\.1"),
        ('base = "lossless"\nother = 1', "unknown key"),
        ("=", "cannot be read"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=says):
            profile_of(str(path))
    with pytest.raises(ConfigError, match="did you mean lossless"):
        profile_of("losless")


def test_every_limit_has_a_reason_and_is_no_stricter_in_a_laxer_profile() -> None:
    for limit in LIMITS:
        assert limit.reason and limit.what and max(limit.values) <= limit.most
        if limit.name not in ("needle_floor", "kl_noise"):
            assert limit.values[0] <= limit.values[1] <= limit.values[2]
    assert limits_table().row_count == len(LIMITS) and len(limits_reasons()) == 1 + 2 * len(LIMITS)


def test_the_report_shows_each_level_and_the_verdict(base: record.Sayings) -> None:
    outcome = gate(Toy(noise=0.5), base, levels=(0, 1))
    assert findings_table(outcome.levels, everything=True).row_count > findings_table(outcome.levels).row_count > 5
    assert told(outcome)[-1].plain == "lossless: FAIL"
    document = outcome.document()
    assert json.loads(json.dumps(document, allow_nan=False))["verdict"] == "FAIL"
