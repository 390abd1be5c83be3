"""The definition sheet: what each tool's words mean, and which of them mean the same.

Two figures are compared only where they are the same quantity here. Knows names and meanings, no files. Sources: vLLM
0.32 ``vllm bench serve``, aiperf 0.13's metrics reference, and this bench's own definitions (measure/load/metrics.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Tool = Literal["longread", "vllm", "aiperf"]
TOOLS: Mapping[Tool, str] = {
    "longread": "longread bench serve",
    "vllm": "vllm bench serve",
    "aiperf": "aiperf profile",
}


@dataclass(frozen=True, slots=True)
class Quantity:
    """``names``: what each tool calls it; ``from_rows``: Longread's files give it only with every request at hand."""

    name: str
    title: str
    meaning: str
    names: Mapping[Tool, str]
    unit: str = "ms"
    higher: bool = False
    from_rows: str | None = None


LATENCIES: Mapping[str, Quantity] = {
    each.name: each
    for each in (
        Quantity(
            "ttft",
            "TTFT",
            "to the first reasoning or answer text; an empty role chunk does not count",
            {"longread": "ttft", "aiperf": "time_to_first_token"},
        ),
        Quantity(
            "ttfc",
            "first chunk",
            "to the first event with a choice, the empty role chunk included",
            {"longread": "ttfc", "vllm": "ttft"},
        ),
        Quantity(
            "ttfrt",
            "first reasoning",
            "to the first reasoning text",
            {"longread": "ttfrt"},
        ),
        Quantity(
            "ttfat",
            "first answer",
            "to the first text of the answer itself, after any reasoning",
            {"longread": "ttfat", "aiperf": "time_to_first_output_token"},
        ),
        Quantity(
            "tpot",
            "TPOT",
            "(last event with a choice - first text) / (output tokens - 1) of each request",
            {"longread": "tpot"},
        ),
        Quantity(
            "tpot_chunk",
            "TPOT from the first chunk",
            "(last - first event with a choice) / (output tokens - 1) of each request",
            {"longread": "tpot_chunk", "vllm": "tpot"},
            from_rows="the requests' file",
        ),
        Quantity(
            "tpot_text",
            "TPOT to the last text",
            "(last text - first text) / (output tokens - 1) of each request",
            {"longread": "tpot_text", "aiperf": "inter_token_latency"},
            from_rows="the requests' file of a run with --save-detailed",
        ),
        Quantity(
            "itl",
            "gap between texts",
            "between neighbouring events with text, pooled over requests: an event may hold several tokens",
            {"longread": "itl", "aiperf": "inter_chunk_latency"},
        ),
        Quantity(
            "itl_chunk",
            "gap between chunks",
            "between neighbouring events with a choice, the empty role chunk included, pooled over requests",
            {"vllm": "itl"},
        ),
        Quantity(
            "e2el",
            "E2E",
            "to the last event with a choice (text or finish reason); usage that comes after it does not count",
            {"longread": "e2el", "vllm": "e2el"},
        ),
        Quantity(
            "e2el_text",
            "E2E to the last text",
            "to the last event with text",
            {"longread": "e2el_text", "aiperf": "request_latency"},
            from_rows="the requests' file of a run with --save-detailed",
        ),
    )
}

RATES: Mapping[str, Quantity] = {
    each.name: each
    for each in (
        Quantity(
            "output_throughput",
            "output tokens/s",
            "output tokens of answered requests over the run's whole time",
            {"longread": "output_throughput", "vllm": "output_throughput", "aiperf": "output_token_throughput"},
            "tokens/s",
            True,
        ),
        Quantity(
            "request_throughput",
            "requests/s",
            "answered requests over the run's whole time",
            {"longread": "request_throughput", "vllm": "request_throughput", "aiperf": "request_throughput"},
            "requests/s",
            True,
        ),
        Quantity(
            "request_goodput",
            "goodput",
            "requests per second that met every SLO",
            {"longread": "request_goodput", "vllm": "request_goodput", "aiperf": "goodput"},
            "requests/s",
            True,
        ),
    )
}

# The same word for different things: said wherever two tools stand side by side.
TRAPS = (
    "TTFT: vLLM's ends with the first chunk, the empty role chunk included; here and in aiperf it ends with text.",
    "TPOT: vLLM's starts at the first chunk, aiperf's (called inter_token_latency) ends with the last text.",
    "ITL: vLLM's are gaps between chunks, aiperf's is a TPOT; with speculative decoding a chunk holds several tokens.",
    "E2E: aiperf's ends with the last text, here and in vLLM with the last event with a choice, usage not counted.",
    "Goodput: each tool holds its own TTFT and TPOT to the limits, so the same run has another goodput in each.",
    "Output tokens: vLLM and Longread take the server's usage, aiperf counts with the client's tokenizer unless told.",
)


def called(quantity: Quantity, tool: Tool) -> str:
    """What ``tool`` calls it, or that it has no such figure."""
    return quantity.names.get(tool, "not measured")


def sheet() -> list[tuple[str, str, str, str, str]]:
    """Rows of title, meaning, and the word of each tool, for a table."""
    tools: tuple[Tool, ...] = ("longread", "vllm", "aiperf")
    found = []
    for each in (*LATENCIES.values(), *RATES.values()):
        words = [each.names.get(tool, "") for tool in tools]
        found.append((each.title, each.meaning, words[0], words[1], words[2]))
    return found
