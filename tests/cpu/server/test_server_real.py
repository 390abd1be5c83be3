"""``longread serve`` as a user runs it: a fixture checkpoint on disk, a process of its own, the real OpenAI client."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from longread.weights.fixture import write_fixture

LONG = "The river runs through the valley, past the mill and the old bridge. " * 60
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@dataclass
class Running:
    url: str
    model: str
    process: subprocess.Popen[str]
    said: list[str]
    log: Path


@pytest.fixture(scope="module", params=["v3", "v4-flash"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("real")
    path, log = folder / str(request.param), folder / "stderr"
    write_fixture(path, request.param, quantised=True)
    command = [sys.executable, "-m", "longread.cli.main", "serve", str(path), "--port", "0", "--max-num-seqs", "4"]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    said: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line.rstrip())
            if found := re.match(r"serving (\S+) on (http://\S+)", line):
                yield Running(found[2], found[1], process, said, log)
                break
        else:
            pytest.fail(f"the server ended: {said} {log.read_text()}")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=60) as made:
        yield made


def ask(client: openai.OpenAI, server: Running, text: str, **options: object) -> openai.types.chat.ChatCompletion:
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=server.model, messages=messages, **options)


def test_start_says_what_was_chosen_and_what_memory_it_takes(server: Running) -> None:
    text = "\n".join(server.said)
    assert "max_num_batched_tokens" in text
    predicted, allocated = (
        float(x.replace(",", "")) for x in re.search(r"predicted (\S+) MiB, allocated (\S+) MiB; ", text).groups()
    )
    assert allocated == pytest.approx(predicted, rel=0.01)
    assert server.model in ("v3", "v4-flash")


def test_start_says_what_is_not_run(server: Running) -> None:
    assert re.search(r"INFO: skipped \d+ tensors \(\d+ bytes\) that are not run: MTP", server.log.read_text())


def test_a_long_prompt_is_read_once(server: Running, client: openai.OpenAI) -> None:
    cold = ask(client, server, LONG + "Who?", temperature=0, max_tokens=12)
    warm = ask(client, server, LONG + "Who?", temperature=0, max_tokens=12)
    other = ask(client, server, LONG + "Where?", temperature=0, max_tokens=1)
    assert cold.usage.prompt_tokens > 512
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens >= 256
    assert other.usage.prompt_tokens_details.cached_tokens >= 256
    assert warm.choices[0].message.content == cold.choices[0].message.content
    assert cold.usage.completion_tokens <= 12


def test_stream_equals_whole_and_seeds_repeat(server: Running, client: openai.OpenAI) -> None:
    options = {"temperature": 1.0, "seed": 5, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    whole = ask(client, server, "Tell me.", **options)
    stream = client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "Tell me."}],
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert ask(client, server, "Tell me.", **(options | {"seed": 6})).choices[0].message.content != text


def test_a_schema_constrains_the_answer(server: Running, client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    options = {"extra_body": {"chat_template_kwargs": {"thinking": False}}, "seed": 1, "max_tokens": 200}
    answer = ask(client, server, "A thing, please.", response_format=form, **options)
    assert answer.choices[0].finish_reason == "stop"
    value = json.loads(answer.choices[0].message.content)
    assert set(value) == {"name", "size"} and 0 <= value["size"] <= 9
    with pytest.raises(openai.BadRequestError):
        bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
        ask(client, server, "x", response_format=bad, max_tokens=5)


def test_logprobs_are_the_models_own(server: Running, client: openai.OpenAI) -> None:
    answer = ask(client, server, "Hello", temperature=0, max_tokens=4, logprobs=True, top_logprobs=3)
    for entry in answer.choices[0].logprobs.content:
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
        assert entry.logprob <= 0


def test_what_cannot_fit_is_refused_and_the_rest_goes_on(server: Running, client: openai.OpenAI) -> None:
    limit = client.models.list().data[0].model_extra["max_model_len"]
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, server, "Hello", max_tokens=limit)
    assert refused.value.code == "context_length_exceeded"
    assert str(limit) in refused.value.message
    assert ask(client, server, "Hello", max_tokens=2).usage.completion_tokens <= 2


def test_leaving_cancels_within_a_step(server: Running, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "Go on and on."}],
        max_tokens=4000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 10
    gone = False
    while not gone and time.monotonic() < deadline:
        text = httpx.get(f"{server.url}/metrics").text
        gone = (
            re.search(r'finished_reason="cancelled"\S*} 1.0', text) is not None
            and re.search(r"num_requests_running\{.*\} 0\.0", text) is not None
        )
    assert gone
