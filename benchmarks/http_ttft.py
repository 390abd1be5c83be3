"""TTFT and TPOT of one OpenAI-compatible server, for comparing two of them by hand: URL MODEL CONTEXT NEW_TOKENS SEED.

Prompts are random token ids, so that no tokenizer takes part. Prints one JSON line, and the sampled ids on standard
error, so that two servers' outputs can be compared. TPOT = (E2E - TTFT) / (output tokens - 1).
"""

import json
import random
import sys
import time

import httpx


def ask(url: str, model: str, prompt: list[int], new_tokens: int) -> tuple[dict[str, float], list[int]]:
    """Stream one greedy completion; returns TTFT in seconds with TPOT in milliseconds, and the output ids."""
    body = {"model": model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    started, times, ids, usage = time.perf_counter(), [], [], {}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as response:
        if response.status_code != 200:
            sys.exit(f"{url}: {response.status_code} {response.read().decode()[:300]}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                times.append(time.perf_counter())
                ids += choice.get("token_ids") or []
    tpot = 1000 * (times[-1] - times[0]) / (usage["completion_tokens"] - 1)
    return {"ttft_s": round(times[0] - started, 3), "tpot_ms": round(tpot, 2)}, ids


def main() -> None:
    url, model = sys.argv[1:3]
    context, new_tokens, seed = (int(text) for text in sys.argv[3:6])
    draw = random.Random(seed)
    figures = []
    for _ in range(3):
        figure, ids = ask(url, model, [draw.randrange(3, 1500) for _ in range(context)], new_tokens)
        figures.append(figure)
        print(ids, file=sys.stderr)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
