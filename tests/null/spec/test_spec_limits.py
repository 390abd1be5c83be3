"""Every refusal names its field, its limit and the value."""

from array import array
from dataclasses import replace

import pytest

from longread.spec.engine import EngineInfo, GenerationRequest, GrammarSpec, SamplingParams
from longread.spec.errors import ContextLengthError, InvalidRequestError
from longread.spec.limits import check_request
from longread.spec.state import HashedTokens

INFO = EngineInfo(
    model="m",
    max_model_len=1000,
    max_request_tokens=1000,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    vocab=100,
    eos_id=1,
    page_tokens=256,
    num_pages=8,
    predicted_bytes=0,
    allocated_bytes=0,
)
NAN, INF = float("nan"), float("inf")


def test_ids_hashed_under_another_root_or_outside_the_vocabulary_are_looked_at():
    """What fits is taken at its word: its makers know the smallest and the largest id."""
    info, ids = replace(INFO, cache_root=b"r"), (5, 6)
    hashed = HashedTokens(b"r", array("i", ids).tobytes(), (), 5, 6)
    check_request(GenerationRequest("r", ids, hashed=hashed), info)
    with pytest.raises(InvalidRequestError, match="token id 600 at position 1"):
        check_request(GenerationRequest("r", (5, 600), hashed=hashed), info)
    bad = HashedTokens(b"r", array("i", (5, 600)).tobytes(), (), 5, 600)
    with pytest.raises(InvalidRequestError, match="token id 600 at position 1"):
        check_request(GenerationRequest("r", (5, 600), hashed=bad), info)


def request(**sampling: object) -> GenerationRequest:
    return GenerationRequest("r", (5, 6), replace(SamplingParams(), **sampling))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", NAN),
        ("temperature", -0.1),
        ("temperature", INF),
        ("temperature", 1e9),
        ("temperature", True),
        ("temperature", "1"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", NAN),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", INF),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", ((100, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((3, NAN),)),
        ("logit_bias", ((3, 101.0),)),
        ("logit_bias", ((3, 1.0), (3, 2.0))),
        ("logit_bias", tuple((i % 100, 0.0) for i in range(1025))),
        ("stop_token_ids", (100,)),
        ("stop_token_ids", tuple([3] * 257)),
        ("seed", 2**64),
        ("seed", 1.0),
        ("logprobs", 21),
        ("logprobs", -1),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("min_tokens", -1),
        ("grammar_after", 4),
    ],
)
def test_values_out_of_range(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check_request(request(**{field: value}), INFO)
    assert refused.value.param == field
    assert refused.value.status == 400


def test_the_edges_are_accepted() -> None:
    check_request(
        request(
            temperature=0,
            top_p=1,
            top_k=10**6,
            min_p=1.0,
            repetition_penalty=0.5,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            logit_bias=((0, -100.0), (99, 100.0)),
            stop_token_ids=(0, 99),
            seed=-(2**63),
            logprobs=20,
            max_tokens=998,
            min_tokens=998,
            grammar=GrammarSpec("json_object"),
            grammar_after=7,
        ),
        INFO,
    )


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(InvalidRequestError, match=r"min_tokens must lie in 0\.\.3, not 4"):
        check_request(request(max_tokens=3, min_tokens=4), INFO)


@pytest.mark.parametrize(("prompt", "message"), [((), "empty"), ((5, 100), "100 at position 1"), ((-1,), "-1")])
def test_prompts(prompt: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_request(GenerationRequest("r", prompt), INFO)


def test_lengths_name_the_limit_and_the_length() -> None:
    with pytest.raises(ContextLengthError, match=r"max_model_len is 1000 tokens.* 1000 prompt tokens.*1001 in all"):
        check_request(GenerationRequest("r", (5,) * 1000), INFO)
    check_request(GenerationRequest("r", (5,) * 999), INFO)
    with pytest.raises(ContextLengthError, match=r"2 prompt tokens .* 999 output tokens, 1001"):
        check_request(request(max_tokens=999), INFO)
    with pytest.raises(ContextLengthError, match=r"2 prompt tokens .* 999 output tokens, 1001"):
        check_request(request(min_tokens=999), INFO)
    check_request(request(min_tokens=998), INFO)
    small = replace(INFO, num_pages=2, max_request_tokens=512)
    with pytest.raises(ContextLengthError, match=r"2 pages hold 512 tokens \(max_model_len is 1000\)"):
        check_request(GenerationRequest("r", (5,) * 512), small)
