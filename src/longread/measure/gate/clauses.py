"""Texts of the kind where one changed word does harm, for general models: contracts, medication plans, rigs and sheds.

The standard library only; a seed gives the same text everywhere. Every clause has a twin that differs in exactly the
critical value (party, negation, dose, unit, name), so that nothing but that value tells them apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

PARTIES = (("Supplier", "Customer"), ("Landlord", "Tenant"), ("Lender", "Borrower"), ("Contractor", "Employer"))
PARTIES_ZH = (("甲方", "乙方"), ("出租人", "承租人"), ("买方", "卖方"), ("发包人", "承包人"))
DUTIES = (
    "the insurance of",
    "repairs to",
    "the customs duties on",
    "the disposal of",
    "the inspection of",
    "damage to",
)
DUTIES_ZH = ("的保险费", "的维修", "的关税", "的处置", "的检验", "的损坏赔偿")
GOODS = ("pump", "crane", "boiler", "lift", "turbine", "gate", "silo", "press", "kiln", "vessel", "winch", "dryer")
GOODS_ZH = ("水泵", "吊车", "锅炉", "电梯", "汽轮机", "闸门", "筒仓", "压机", "窑炉", "容器", "绞车", "烘干机")
DRUGS = ("amoxicillin", "metoprolol", "enoxaparin", "digoxin", "furosemide", "gentamicin", "levothyroxine", "morphine")
DRUGS_ZH = ("阿莫西林", "美托洛尔", "依诺肝素", "地高辛", "呋塞米", "庆大霉素", "左甲状腺素", "吗啡")
DOSES = ("0.125 mg", "1.25 mg", "12.5 mg", "25 mg", "50 mg", "50 mcg", "500 mcg", "500 mg", "5 mL", "40 mg", "4 mg")
DOSES_ZH = (
    "0.125 毫克",
    "1.25 毫克",
    "12.5 毫克",
    "25 毫克",
    "50 毫克",
    "50 微克",
    "500 微克",
    "500 毫克",
    "5 毫升",
    "40 毫克",
)
HOURS = (4, 6, 8, 12, 24)
PRESSURES = ("0.6 MPa", "6 MPa", "600 kPa", "16 bar", "1.6 bar", "160 kPa")
PRESSURES_ZH = ("0.6 兆帕", "6 兆帕", "600 千帕", "160 千帕", "1.6 兆帕", "16 千帕")
PEOPLE = ("Dr Keller", "Dr Novak", "Dr Silva", "Dr Lund", "Dr Moreau", "Dr Costa", "Dr Olsen", "Dr Marin")
PEOPLE_ZH = ("王立新", "李建国", "张海燕", "刘志强", "陈晓梅", "杨文博", "赵玉兰", "周国平")


@dataclass(frozen=True, slots=True)
class Probe:
    """A question about one line, and the value that its answer must hold. ``negated``: yes or no is the value."""

    kind: str
    question: str
    value: str
    line: int


def write(seed: int, lines: int, language: str) -> tuple[str, list[Probe]]:
    """``lines`` numbered clauses and a probe for each of them, the kinds in mixed order."""
    rng = Random(seed)
    chinese = language == "zh"
    makers = (_party, _negation, _dose, _pressure, _person)
    out, probes = [], []
    for line in range(lines):
        text, kind, question, value = makers[rng.randrange(len(makers))](rng, line + 1, chinese)
        out.append(f"{line + 1}. {text}\n")
        probes.append(Probe(kind, question, value, line))
    rng.shuffle(probes)
    return "".join(out), probes


def instruction(language: str) -> str:
    """What the model is told besides the text."""
    if language == "zh":
        return "只根据用户给出的文本回答。只写所问的值，与原文完全一致。文本中没有时，只写：文中没有。"
    return (
        "Answer from the user's text only. Give just the value that is asked for, exactly as the text has it. "
        "If the text does not say it, answer: Not in the document."
    )


def _thing(rng: Random, number: int, chinese: bool) -> str:
    """A thing that no other clause names: its number is the clause's, in another notation."""
    names = GOODS_ZH if chinese else GOODS
    return f"{number}号{rng.choice(names)}" if chinese else f"{rng.choice(names)} {number}"


def _pair(rng: Random, chinese: bool) -> Sequence[str]:
    pair = list(rng.choice(PARTIES_ZH if chinese else PARTIES))
    rng.shuffle(pair)
    return pair


def _party(rng: Random, number: int, chinese: bool) -> tuple[str, str, str, str]:
    payer, other = _pair(rng, chinese)
    at, thing = rng.randrange(len(DUTIES)), _thing(rng, number, chinese)
    if chinese:
        duty = thing + DUTIES_ZH[at]
        return f"{duty}由{payer}承担，{other}不承担。", "party", f"第{number}条：{duty}由谁承担？", payer
    duty = f"{DUTIES[at]} {thing}"
    text = f"The {payer}, and not the {other}, shall bear the cost of {duty}."
    return text, "party", f"Clause {number}: who bears the cost of {duty}?", payer


def _negation(rng: Random, number: int, chinese: bool) -> tuple[str, str, str, str]:
    allowed, thing = rng.randrange(2) == 0, _thing(rng, number, chinese)
    if chinese:
        text = f"{thing}在夜间{'可以' if allowed else '不得'}运行。"
        return (
            text,
            "negation",
            f"第{number}条：{thing}在夜间可以运行吗？只答“可以”或“不得”。",
            "可以" if allowed else "不得",
        )
    text = f"The {thing} may {'' if allowed else 'not '}be operated at night."
    question = f"Clause {number}: may the {thing} be operated at night? Answer only yes or no."
    return text, "negation", question, "yes" if allowed else "no"


def _dose(rng: Random, number: int, chinese: bool) -> tuple[str, str, str, str]:
    at, hours = rng.randrange(len(DRUGS)), rng.choice(HOURS)
    if chinese:
        dose = rng.choice(DOSES_ZH)
        text = f"第{number}号病人：{DRUGS_ZH[at]}每次{dose}，每{hours}小时一次。"
        return text, "dose", f"第{number}号病人每次用多少{DRUGS_ZH[at]}？", dose
    dose = rng.choice(DOSES)
    text = f"Patient {number}: {DRUGS[at]} {dose} every {hours} hours."
    return text, "dose", f"What is the single dose of {DRUGS[at]} for patient {number}?", dose


def _pressure(rng: Random, number: int, chinese: bool) -> tuple[str, str, str, str]:
    thing = _thing(rng, number, chinese)
    if chinese:
        value = rng.choice(PRESSURES_ZH)
        return f"{thing}的最大工作压力为{value}。", "unit", f"{thing}的最大工作压力是多少？", value
    value = rng.choice(PRESSURES)
    text = f"The maximum working pressure of {thing} is {value}."
    return text, "unit", f"What is the maximum working pressure of {thing}?", value


def _person(rng: Random, number: int, chinese: bool) -> tuple[str, str, str, str]:
    people = PEOPLE_ZH if chinese else PEOPLE
    first = rng.randrange(len(people))
    name, deputy = people[first], people[first - 1 - rng.randrange(len(people) - 1)]
    thing = _thing(rng, number, chinese)
    if chinese:
        return f"{thing}由{name}批准停机，{deputy}为代理人。", "name", f"{thing}的停机由谁批准（不是代理人）？", name
    text = f"{name} approves the shutdown of {thing}; the deputy is {deputy}."
    return text, "name", f"Who approves the shutdown of {thing} (not the deputy)?", name
