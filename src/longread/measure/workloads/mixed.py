"""The workload ``mixed``: short chats beside long documents, in drawn order.

Knows shares and the order; the asks are those of ``chat`` and ``documents``, counted apart.
"""

from random import Random
from typing import Final

from longread.measure.workloads.ask import Ask, Workload
from longread.measure.workloads.chat import CHAT_MAX, CHAT_MIN, Turns
from longread.measure.workloads.counting import counter
from longread.measure.workloads.documents import MIN_TOKENS, Library, plan
from longread.measure.workloads.options import (
    LANGUAGE,
    MAX_OUTPUT,
    MAX_TOKENS,
    SEED,
    TOKENIZER,
    Option,
    Settings,
    number,
    prompts,
    several,
    tokens,
    whole,
)
from longread.measure.workloads.sequence import Asks, workload
from longread.measure.workloads.texts import OWN_DOMAINS
from longread.spec.errors import ConfigError

OPTIONS: Final = (
    SEED,
    TOKENIZER,
    prompts(64),
    Option("long_share", number(0, 1), 0.125, "share of the asks that are about a long document"),
    Option("isl_short", tokens(CHAT_MIN, CHAT_MAX), "lognormal:320:0.7", "tokens of a short prompt"),
    Option("isl_long", tokens(MIN_TOKENS, MAX_TOKENS), "65536", "tokens of a long one"),
    Option("osl_short", tokens(1, MAX_OUTPUT), "128", "tokens of an answer to a short prompt"),
    Option("osl_long", tokens(1, MAX_OUTPUT), "128", "tokens of an answer to a long one"),
    Option("questions", whole(1, 256), 1, "asked about each long document"),
    LANGUAGE,
    Option("domains", several(*OWN_DOMAINS), "report,manual,formulary,codebase", "what both are about, in turn"),
)


def build(given: Settings) -> Workload:
    count, total, rng = counter(given["tokenizer"]), given["num_prompts"], Random(given["seed"])
    longs = round(total * given["long_share"])
    if given["long_share"] > 0 and longs == 0:
        raise ConfigError(
            f"long_share={given['long_share']:g} of {total} prompts is none: take num_prompts >= "
            f"{round(1 / given['long_share'])} or a larger share"
        )
    common = {name: given[name] for name in ("seed", "language", "domains")}
    long_given = {
        **common,
        "num_prompts": max(longs, 1),
        "isl": given["isl_long"],
        "osl": given["osl_long"],
        "questions": given["questions"],
        "prefix_share": None,
        "kinds": None,
        "audience": "general",
    }
    library = Library(long_given, count, name="long", kind="long", salt=1)
    turns = Turns(common, count, given["isl_short"], given["osl_short"], "short", 4)
    places = plan(longs, -(-longs // given["questions"]), "grouped", rng) if longs else []
    order = [True] * longs + [False] * (total - longs)
    rng.shuffle(order)
    before = _running(order)

    def make(index: int) -> Ask:
        if order[index]:
            return library.ask(places[before[index]])
        return turns.ask(index - before[index])

    return workload("mixed", given, Asks(total, make), count, long_prompts=longs)


def _running(order: list[bool]) -> list[int]:
    """How many long asks come before each."""
    found, seen = [], 0
    for long in order:
        found.append(seen)
        seen += long
    return found
