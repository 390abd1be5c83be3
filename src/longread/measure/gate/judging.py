"""From what two servers said to findings: likelihood, needles, answers, critical values (levels 1 to 4).

Pure: answers in, findings out. ``error``: what the interval of this look may be wrong by (statistics.error_of_look).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median, stdev

from longread.measure.gate import critical, texts
from longread.measure.gate.distribution import Difference, difference, divergence_point
from longread.measure.gate.profiles import Profile
from longread.measure.gate.record import Said
from longread.measure.gate.statistics import (
    bootstrap_mean,
    clean_samples,
    paired_drop,
    samples_for_mean,
    samples_for_rate,
    share,
)
from longread.measure.gate.verdict import Finding, LevelResult, Verdict, at_least, at_most, told
from longread.measure.workloads import Expected, score

Pair = tuple[Said, Said]  # base, candidate
BANDS = ((0.0, 1 / 3, "front"), (1 / 3, 2 / 3, "middle"), (2 / 3, 1.01, "end"))
ABSENT = (
    "not in the document",
    "not in the text",
    "not stated",
    "does not say",
    "not mentioned",
    "not specified",
    "文中没有",
    "未提及",
    "没有提到",
    "没有说明",
)
LONGEST_TEXT = 160  # characters of an answer in a note
LEAST_SHARED = 0.5  # of the base's probability on tokens that both told; with less the KL's bound says too little


def pairs_of(base: Mapping[str, Said], candidate: Iterable[Said], level: int) -> list[Pair]:
    """What both were asked at a level and both answered."""
    return [
        (base[one.key], one)
        for one in candidate
        if level in one.levels and one.key in base and one.error is None and base[one.key].error is None
    ]


def failures(level: int, candidate: Iterable[Said]) -> list[Finding]:
    """Asks without an answer: what they would have shown is open, so the level is."""
    failed = [one for one in candidate if level in one.levels and one.error is not None]
    if not failed:
        return []
    note = f"{failed[0].key}: {failed[0].error}"
    return [Finding(level, "requests that failed", "INCONCLUSIVE", float(len(failed)), note=note)]


def differences(base: Said, candidate: Said, tie: float) -> list[Difference]:
    """Position by position, as far as the contexts are the same or the candidate was led along the base."""
    ours, theirs = base.distributions, candidate.distributions
    same = divergence_point(ours, theirs)
    pairs = list(zip(ours[:same], theirs[:same], strict=True))
    if candidate.forced and candidate.forced_from == same:
        pairs += list(zip(ours[same:], candidate.forced_distributions, strict=False))
    return [difference(a, b, tie) for a, b in pairs if a.top and b.top]


def ends_apart(base: Said, candidate: Said) -> bool:
    """Whether one side ends where the other goes on, and the end is no position of its own: for the two the most
    probable next token is another.
    """
    same = divergence_point(base.distributions, candidate.distributions)
    short, long = sorted((base, candidate), key=lambda one: len(one.positions))
    parted = same < len(long.positions) and same == len(short.positions) and base.text != candidate.text
    return parted and short.finish_reason == "stop" and not candidate.forced


def noise_of(base: Mapping[str, Said], again: Iterable[Said], profile: Profile) -> float | None:
    """Mean KL of a server against itself; None where nothing was asked again."""
    found = [d.kl for a, b in pairs_of(base, again, 1) for d in differences(a, b, profile["logprob_gap"])]
    return fmean(found) if found else None


def kl_limit(profile: Profile, noise: float | None) -> float:
    """The limit of mean KL: the profile's, or less where the base is known to be quieter."""
    if noise is None or not profile["kl_noise"]:
        return profile["kl_mean"]
    return min(profile["kl_mean"], max(profile["kl_floor"], profile["kl_noise"] * noise))


def likelihood(pairs: Sequence[Pair], profile: Profile, error: float, noise: float | None = None) -> LevelResult:
    """Level 1. Samples are documents: positions of one document hang together. ``noise``: the base's own."""
    grouped: dict[int, dict[str, list[Difference]]] = defaultdict(lambda: defaultdict(list))
    ends: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    whole = fallen = foreign = 0
    for base, candidate in pairs:
        found = differences(base, candidate, profile["logprob_gap"])
        whole, fallen = whole + len(base.positions), fallen + len(base.positions) - len(found)
        foreign += None not in (base.prompt_ids, candidate.prompt_ids) and base.prompt_ids != candidate.prompt_ids
        grouped[base.length][base.paper] += found
        ends[base.length][base.paper] += ends_apart(base, candidate)
    if not any(any(papers.values()) for papers in grouped.values()):
        return LevelResult(1, not_run="no position was told by both sides (no log-probabilities)")
    findings: list[Finding] = []
    everything: dict[str, list[Difference]] = {}
    for length in sorted(grouped):
        findings += _of_length(length, grouped[length], ends[length], profile, error, kl_limit(profile, noise))
        everything |= grouped[length]
    rises = _groups(everything, lambda d: d.nll)
    values = [value for group in rises for value in group]
    if values:
        findings.append(at_most(1, "nll", fmean(values), bootstrap_mean(rises, error), profile["nll"], len(rises)))
    if noise is not None:
        findings.append(told(1, "kl_mean of the base against itself", noise, len(everything)))
    findings += _shape([d for group in everything.values() for d in group], len(everything))
    notes = [f"{fallen} of {whole} positions stand behind a difference and were not compared"] if fallen else []
    if foreign:
        notes.append(f"{foreign} prompts have other token ids on both sides: another tokenizer or chat template")
    ended = sum(sum(papers.values()) for papers in ends.values())
    if ended:
        notes.append(f"{ended} answers end where the base's go on, or go on where they end; each counts as a flip")
    return LevelResult(1, tuple(findings), notes=tuple(notes))


def _groups(papers: Mapping[str, Sequence[Difference]], of: Callable[[Difference], float | None]) -> list[list[float]]:
    found = [[v for v in map(of, group) if v is not None] for group in papers.values()]
    return [group for group in found if group]


def _of_length(
    length: int,
    papers: Mapping[str, Sequence[Difference]],
    ends: Mapping[str, int],
    profile: Profile,
    error: float,
    limit: float,
) -> list[Finding]:
    """``ends``: answers of each paper that end where the other side's goes on."""
    kls = _groups(papers, lambda d: d.kl)
    flips = [[*(float(d.flipped) for d in found), *[1.0] * ends[paper]] for paper, found in papers.items()]
    flips = [group for group in flips if group]
    count = sum(map(len, flips))
    flipped = sum(map(sum, flips))
    low, high = bootstrap_mean(flips, error)
    by_position = share(int(flipped), count, error)
    note = "" if len(kls) >= 3 else "at least 3 documents of a length are needed"
    return [
        _kl(f"kl_mean {_at(length)}", papers, kls, error, limit, note),
        # Documents tell how flips cluster, Wilson's what none of so many means: the wider side of both.
        at_most(
            1,
            f"flips {_at(length)}",
            flipped / count,
            (max(0.0, min(low, by_position[0])), min(1.0, max(high, by_position[1]))),
            profile["flips"],
            len(flips),
            needed=_more(len(flips), count, profile["flips"], error) if not flipped else None,
            note=note,
        ),
    ]


def _kl(
    name: str,
    papers: Mapping[str, Sequence[Difference]],
    kls: Sequence[Sequence[float]],
    error: float,
    limit: float,
    note: str,
) -> Finding:
    """A lower bound that is low shows nothing where most of the probability lies on tokens that were not told."""
    if not kls:
        return Finding(1, name, "INCONCLUSIVE", note="no position was told by both sides")
    shared = fmean([d.shared for found in papers.values() for d in found])
    value = fmean([v for group in kls for v in group])
    found = at_most(1, name, value, bootstrap_mean(kls, error), limit, len(kls), note=note)
    if found.verdict == "PASS" and shared < LEAST_SHARED:
        untold = f"the tokens that both told hold {shared:.0%} of the base's probability; of the rest nothing is known"
        return replace(found, verdict="INCONCLUSIVE", note=untold)
    return enough(found, [fmean(group) for group in kls])


def enough(finding: Finding, means: Sequence[float]) -> Finding:
    """A failure with the number of documents that would have shown it with a power of 80 %, by how they vary."""
    if finding.verdict != "FAIL" or finding.value is None or finding.limit is None or len(means) < 2:
        return finding
    return replace(finding, needed=samples_for_mean(stdev(means), finding.value - finding.limit))


def _at(length: int) -> str:
    return f"at {length:,}" if length else "of own asks"


def _more(documents: int, positions: int, limit: float, error: float) -> int:
    """Documents until none of their positions' having flipped means ``limit``."""
    return max(documents + 1, math.ceil(clean_samples(max(limit, 1e-6), error) * documents / positions))


def _shape(found: Sequence[Difference], documents: int) -> list[Finding]:
    """Figures that are shown: the form of the distribution of KL, agreement, change of probability."""
    kls = sorted(d.kl for d in found)
    changes = [d.probability for d in found if d.probability is not None]
    rms = math.sqrt(fmean([c * c for c in changes])) if changes else None
    agree = sum(not d.flipped and not d.tied for d in found)
    return [
        told(1, "kl_median", median(kls), len(kls)),
        told(1, "kl_p99", kls[min(len(kls) - 1, math.ceil(0.99 * len(kls)) - 1)], len(kls)),
        told(1, "kl_max", kls[-1], len(kls)),
        told(1, "same_top_1", agree / len(found), len(found), share(agree, len(found))),
        told(1, "ties", float(sum(d.tied for d in found)), len(found)),
        told(1, "rms_delta_p", rms, len(changes)),
        told(1, "documents", float(documents), documents),
    ]


def right(one: Said) -> bool:
    """Whether an answer holds what it must: all values, or that the text does not say it. The user's own asks are
    scored as their workload's are.
    """
    if one.judged is not None:
        return score(Expected(one.judged, one.expected or "", one.alternatives, one.values), one.text).right
    if one.values:
        return all(critical.stands(value, one.text) for value in one.values)
    said = texts.normalised(one.text)
    return any(texts.normalised(phrase) in said for phrase in (one.expected or ABSENT[0], *ABSENT))


def needles(candidate: Sequence[Said], base: Mapping[str, Said] | None, profile: Profile, error: float) -> LevelResult:
    """Level 2. Judged against the base, question by question, or against the floor where there is none."""
    asked = [one for one in candidate if 2 in one.levels and one.error is None]
    if not asked:
        return LevelResult(2, not_run="no question was answered")
    findings = failures(2, candidate)
    count = sum(map(right, asked))
    if base is None:
        floor = profile["needle_floor"]
        findings.append(
            at_least(2, "needle_floor", count / len(asked), share(count, len(asked), error), floor, len(asked))
        )
    else:
        pairs = pairs_of(base, asked, 2)
        findings.append(_drop(2, "needle_drop", pairs, right, profile["needle_drop"], error))
    return LevelResult(2, (*findings, *_cells(asked)))


def _cells(asked: Sequence[Said]) -> list[Finding]:
    """Right answers by length, kind and depth, each with Wilson's interval."""
    cells: dict[str, list[bool]] = defaultdict(list)
    for one in asked:
        cells[f"{one.length:,} {one.kind}"].append(right(one))
        for low, high, name in BANDS:
            if one.depth is not None and low <= one.depth < high:
                cells[f"{one.length:,} {name}"].append(right(one))
    cells["all"] = [right(one) for one in asked]
    return [
        told(2, f"right: {name}", sum(found) / len(found), len(found), share(sum(found), len(found)))
        for name, found in sorted(cells.items())
    ]


def _drop(
    level: int, name: str, pairs: Sequence[Pair], good: Callable[[Said], bool], limit: float, error: float
) -> Finding:
    lost = [b for a, b in pairs if good(a) and not good(b)]
    won = sum(good(b) and not good(a) for a, b in pairs)
    if not pairs:
        return Finding(level, name, "INCONCLUSIVE", note="nothing was asked of both")
    clean = clean_samples(limit, error) if limit and not lost and not won else None
    note = f"lost {len(lost)}, won {won}" + (f"; first lost: {lost[0].key}" if lost else "")
    had = sum(good(a) for a, _ in pairs)
    if had <= limit * len(pairs):
        said = f"the base has {had} of {len(pairs)}: there is too little to lose for a loss to show"
        return Finding(level, name, "INCONCLUSIVE", (len(lost) - won) / len(pairs), limit=limit, note=said)
    return at_most(
        level,
        name,
        (len(lost) - won) / len(pairs),
        paired_drop(len(lost), won, len(pairs), error),
        limit,
        len(pairs),
        needed=clean,
        note=note,
    )


def matches(one: Said) -> bool:
    """Exact match with the reference, or with its values alone."""
    references = [one.expected or "", *one.alternatives] + (
        ["; ".join(one.values), "；".join(one.values)] if one.values else []
    )
    return texts.exact(one.text, references)


def answers(candidate: Sequence[Said], base: Mapping[str, Said] | None, profile: Profile, error: float) -> LevelResult:
    """Level 3. Without a base, matches and overlap are told, not judged: how good a model is, is not the question."""
    asked = [one for one in candidate if 3 in one.levels and one.error is None]
    if not asked:
        return LevelResult(3, not_run="no question was answered")
    findings = failures(3, candidate)
    if base is not None:
        pairs = pairs_of(base, asked, 3)
        overlap = _overlap_drop(pairs, profile, error)
        exact = _drop(3, "exact_drop", pairs, matches, profile["exact_drop"], error)
        if pairs and exact.needed is None and exact.low is None and overlap.verdict != "INCONCLUSIVE":
            exact = replace(exact, verdict=None)  # a base that answers in its own words is judged by the overlap
        findings += [exact, overlap]
        findings.append(
            _drop(3, "repetition", pairs, lambda s: texts.repeats(s.text) is None, profile["repetition"], error)
        )
        findings.append(_drop(3, "truncation", pairs, _ends, profile["truncation"], error))
    else:
        for name, bad in (
            ("repetition", [s for s in asked if texts.repeats(s.text) is not None]),
            ("truncation", [s for s in asked if not _ends(s)]),
        ):
            note = f"first: {bad[0].key}: {_short(bad[0].text)}" if bad else ""
            value, limit = len(bad) / len(asked), profile[name]
            clean = clean_samples(limit, error) if limit and not bad else None
            interval = share(len(bad), len(asked), error)
            findings.append(at_most(3, name, value, interval, limit, len(asked), needed=clean, note=note))
    count = sum(map(matches, asked))
    f1 = [texts.rouge_l(one.text, one.expected or "") for one in asked]
    findings.append(told(3, "exact match", count / len(asked), len(asked), share(count, len(asked))))
    findings.append(told(3, "rouge_l", fmean(f1), len(f1)))
    findings.append(told(3, "least novelty", min(texts.novelty(one.text) for one in asked), len(asked)))
    return LevelResult(3, tuple(findings))


def _ends(one: Said) -> bool:
    return not texts.truncated(one.text, one.finish_reason)


def _overlap_drop(pairs: Sequence[Pair], profile: Profile, error: float) -> Finding:
    groups: dict[str, list[float]] = defaultdict(list)
    for base, candidate in pairs:
        reference = base.expected or ""
        groups[base.paper].append(texts.rouge_l(base.text, reference) - texts.rouge_l(candidate.text, reference))
    losses = list(groups.values())
    if not losses:
        return Finding(3, "rouge_drop", "INCONCLUSIVE", note="nothing was asked of both")
    value = fmean([loss for group in losses for loss in group])
    had = fmean([texts.rouge_l(base.text, base.expected or "") for base, _ in pairs])
    if had <= profile["rouge_drop"]:
        said = f"the base's ROUGE-L is {had:.3f}: there is too little to lose for a loss to show"
        return Finding(3, "rouge_drop", "INCONCLUSIVE", value, limit=profile["rouge_drop"], note=said)
    return at_most(3, "rouge_drop", value, bootstrap_mean(losses, error), profile["rouge_drop"], len(losses))


def critical_values(
    candidate: Sequence[Said], base: Mapping[str, Said] | None, profile: Profile, error: float
) -> LevelResult:
    """Level 4. One changed value is enough to fail; that none was seen passes once there were enough of them."""
    asked = [one for one in candidate if 4 in one.levels and one.critical and one.error is None]
    if not asked:
        return LevelResult(4, not_run="no critical value was asked for")
    if base is not None:
        asked = [one for one in asked if one.key in base and base[one.key].error is None]
    if not asked:
        return LevelResult(4, findings=tuple(failures(4, candidate)), not_run="the base has none of what was asked")
    bad: list[str] = []
    repaired = wrong = telling = 0
    for one in asked:
        untrue = critical.untrue(one.values, one.text)
        before = None if base is None else base[one.key]
        # Where the base names no value at all, that the candidate names none either shows nothing.
        telling += before is None or bool(critical.find(before.text)) or not critical.untrue(before.values, before.text)
        if before is None:
            if untrue:
                bad.append(f"{one.key}: {'; '.join(untrue)}; said {_short(one.text)}")
            continue
        wrong += bool(critical.untrue(before.values, before.text))
        changed = critical.changes(before.text, one.text)
        if not untrue and critical.untrue(before.values, before.text):
            repaired += 1
        elif changed or (untrue and not critical.untrue(before.values, before.text)):
            bad.append(f"{one.key}: {'; '.join(changed or untrue)}; said {_short(one.text)}")
    return LevelResult(4, (*failures(4, candidate), *_critical(asked, bad, repaired, wrong, telling, profile, error)))


def _critical(
    asked: Sequence[Said],
    bad: Sequence[str],
    repaired: int,
    wrong: int,
    telling: int,
    profile: Profile,
    error: float,
) -> list[Finding]:
    """``telling``: how many of ``asked`` would have shown a change."""
    telling = max(telling, len(bad))
    allowed, bound = profile["critical_changes"], profile["critical_bound"]
    over = len(bad) > allowed or repaired > profile["critical_repairs"]
    interval = share(len(bad), telling, error)
    note = "; ".join(bad[:3]) + (f"; {len(bad) - 3} more" if len(bad) > 3 else "")
    if repaired and repaired > profile["critical_repairs"]:
        note = "; ".join(part for part in (note, f"{repaired} became right that the base had wrong") if part)
    count = float(len(bad))
    rate = len(bad) / telling if telling else 0.0
    shown = samples_for_rate(rate) if over and 0 < rate < 1 else None
    verdict: Verdict = "FAIL" if over else "PASS" if telling else "INCONCLUSIVE"
    if not telling:
        note = f"the base names no critical value in any of {len(asked)} answers"
    first = Finding(4, "critical_changes", verdict, count, None, None, allowed, telling, shown, note)
    findings = [first]
    if not over:
        clean = clean_samples(bound, error) if bound and not bad else None
        findings.append(at_most(4, "critical_bound", rate, interval, bound, telling, needed=clean))
    kinds: dict[str, int] = defaultdict(int)
    for one in asked:
        for kind in {value.kind for text in one.values for value in critical.find(text)} or {"other"}:
            kinds[kind] += 1
    findings += [told(4, f"asked: {kind}", float(count), count) for kind, count in sorted(kinds.items())]
    return [
        *findings,
        told(4, "wrong in the base", float(wrong), len(asked)),
        told(4, "repaired", float(repaired), len(asked)),
    ]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= LONGEST_TEXT else f"{line[:LONGEST_TEXT]}...")


def judge(
    level: int,
    candidate: Sequence[Said],
    base: Mapping[str, Said] | None,
    profile: Profile,
    error: float,
    again: Sequence[Said] = (),
) -> LevelResult:
    """One of levels 1 to 4. ``again``: the base's asks that were put to it twice."""
    if level == 1:
        if base is None:
            return LevelResult(1, not_run="a base to compare with is needed (--base, made by `longread gate base`)")
        found = likelihood(pairs_of(base, candidate, 1), profile, error, noise_of(base, again, profile))
        return LevelResult(1, (*failures(1, candidate), *found.findings), found.not_run, found.notes)
    judges = {2: needles, 3: answers, 4: critical_values}
    return judges[level](candidate, base, profile, error)
