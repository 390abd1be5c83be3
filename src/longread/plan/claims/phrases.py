"""The forms in which claims are written, English and Chinese, as patterns over normalised text. Data only."""

import re


def _re(*parts: str) -> re.Pattern[str]:
    return re.compile("".join(parts))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _any(words: str) -> str:
    """One of the words of a text, the longer first; an underscore stands for blanks, one or none or more."""
    found = sorted(words.split(), key=len, reverse=True)
    return "(?:" + "|".join(re.escape(word).replace("_", r"\s*") for word in found) + ")"


NUMBER = r"(?<![\d.])\d+(?:\.\d+)?"
UNIT = _any(
    """milliseconds millisecond msecs msec ms 毫秒 microseconds microsecond us µs μs 微秒 minutes minute mins min 分钟
    seconds second secs sec s 秒"""
)
DURATION = rf"({NUMBER})\s*({UNIT})(?![a-z])"
_IS = r"\s*(?:of|is|[=:]|为|是|达到?|长度)?\s*"
_LINK_WORDS = _any(
    """of in at is was to a the as under below only within latency time about just 仅 只 要 为 是 约 延迟
    时延 时间 达 达到 降到 低至 以内 内 不到 小于 在 平均 需"""
)
LINK = rf"(?:\s|[:=<~≈≤]|{_LINK_WORDS}|p\d\d)*"
_LATENCY = r"(?:\s*(?:延迟|时延|时间))?"
FIRST = (
    r"(?:ttft|(?:time[- ]to[- ])?first[- ]tokens?(?:[- ](?:latency|time))?"
    rf"|首\s*个?\s*tokens?{_LATENCY}|首字{_LATENCY}|首包{_LATENCY}|首词{_LATENCY})"
)
EACH = (
    r"(?:tpot|itl|time[- ]per[- ](?:output[- ])?token|inter[- ]token(?:[- ]latency)?"
    r"|per[- ](?:output[- ])?token(?:[- ]latency)?"
    rf"|每\s*个?\s*tokens?{_LATENCY}|tokens?\s*间隔)"
)
FIRST_TIME = (_re(FIRST, LINK, DURATION), _re(DURATION, r"\s*(?:的|to|for|of|the|a|\s)*", FIRST))
EACH_TIME = (
    _re(EACH, LINK, DURATION),
    _re(DURATION, r"\s*(?:/\s*(?:tokens?|tok|字)|(?:的|per|each|a|of|\s)*", EACH, r"|(?:per|a|each|every)\s+tokens?)"),
)
ANY_TIME = _re(DURATION)
LONGER = _re(
    r"(?:[>≥]\s*=?|\bover\b|\babove\b|more than|at least|no less than|超过|大于|高于|不低于|至少)\s*", DURATION
)

SCALE = r"([kKmMb]|千|万|百万|亿)"
LENGTH = rf"({NUMBER})\s*{SCALE}?"
_TOKEN = r"(?:tokens?|toks?|词元?|字)"
_NOT_A_RATE = r"(?!\s*(?:tok|/|ms|s\b|%|tps))"
RATE = _re(
    rf"{LENGTH}\s*(?:(?:input|output|prompt|prefill|decode|输入|输出)\s*)?(?:{_TOKEN}|tps|t)?",
    r"\s*(?:/\s*(?:user|req|request|gpu|card|卡)\s*)?(?:(?:/|per|每)\s*(?:seconds?|secs?|sec|s|秒)(?![a-z])|(?<=tps))",
)
RATE_BEFORE = _re(rf"每秒\s*{LENGTH}\s*(?:个\s*)?{_TOKEN}")

_WHO = r"(?:requests?|users?|streams?|sessions?)"
STREAMS = (
    _re(
        rf"{LENGTH}\s*(?:路|个|名)?\s*(?:simultaneous|parallel|同时)?\s*",
        rf"(?:concurrent|concurrency|并发(?:数|度|用户|请求|量)?)(?:\s*{_WHO})?",
    ),
    _re(rf"(?:concurrency|concurrent|并发(?:数|度|量)?|batch(?:\s*size)?|bs){_IS}{LENGTH}{_NOT_A_RATE}"),
    _re(rf"{LENGTH}\s*(?:路|个用户|个请求|名用户|用户|{_WHO}|in[- ]flight|clients?)(?!\s*/)"),
)
SHARE = (
    _re(
        rf"({NUMBER})\s*%\s*(?:of\s+(?:the\s+)?(?:prompt|prefix|input)\s+)?(?:was\s+|is\s+|的)?",
        r"(?:prefix(?:[- ]cache)?|cached?|kv|hit|缓存|前缀|命中)",
        r"(?:\s*(?:cached?|hits?|rate|ratio|命中率?|缓存))*",
    ),
    _re(
        r"(?:(?:prefix|kv|cache|前缀|缓存)\s*-?\s*)*",
        rf"(?:hit[- ]?(?:rate|ratio)|hits?|命中率?|prefix|前缀|cached){_IS}({NUMBER})\s*%",
    ),
    _re(rf"(?:prefix|hit[- ](?:rate|ratio)|命中率){_IS}(0?\.\d+|1\.0+)(?![\d%])"),
)
SUFFIX = (
    _re(rf"(?:suffix|question|new tokens|后缀|问题|新增){_IS}{LENGTH}(?:\s*tokens?)?"),
    _re(
        rf"{LENGTH}[- ]*(?:(?:new|uncached)[- ]+tokens?|tokens?[- ]+(?:suffix|question|后缀|问题)",
        r"|(?:suffix|question|后缀|新(?:增)?\s*tokens?))",
    ),
)
IN_OUT = _re(rf"(?<![\w/]){LENGTH}\s*/\s*{LENGTH}(?:\s*tokens?)?(?![\w/])")
OUT_LENGTH = (
    _re(rf"(?:osl|output(?:\s*length)?|out|输出(?:长度)?|生成){_IS}{LENGTH}(?:\s*tokens?)?{_NOT_A_RATE}"),
    _re(rf"{LENGTH}\s*(?:tokens?\s*)?(?:out\b|output|输出)"),
)
IN_LENGTH = (
    _re(
        r"(?:isl|input(?:\s*length)?|context(?:\s*(?:length|window))?|prompt(?:\s*length)?",
        rf"|输入(?:长度)?|上下文(?:长度)?|长度){_IS}{LENGTH}(?:\s*tokens?)?{_NOT_A_RATE}",
    ),
    _re(
        rf"{LENGTH}[- ]*{_TOKEN}?[- ]*(?:的|of)?\s*",
        rf"(?:in\b(?!\s*{NUMBER})|input|prompts?|contexts?(?:\s+(?:length|window))?|ctx|输入|上下文|长文本?|prefill)",
    ),
    _re(rf"{LENGTH}[- ]*{_TOKEN}"),
    _re(rf"({NUMBER})\s*([kKmM]|万|百万|千)(?![a-z])"),
    _re(r"(?<![\d.])(\d{4,})()(?![\w%.])"),
)

STRATEGY = _re(r"(?<![a-z])((?:(?:(?:tp|pp|cp|dp|ep)\s*=?\s*\d+|ep)(?:\b|(?<=\d)|_)\s*[-+/_, ]?\s*)+)(?![\da-z])")
PERCENTILE = _re(r"(?<![a-z])(p\d{2,}(?:\.\d+)?|median|mean|average|平均|中位数?)")
ENGINE = _re(r"(?<![a-z])(vllm|sglang|longread)(?:\s*v?\d+\.\d+(?:\.\d+)?(?:rc\d+)?)?")
STATE = (
    (
        "cold",
        _re(
            r"without (?:any )?(?:prefix )?cach(?:e|ing)|no (?:prefix )?cach(?:e|ing)|uncached",
            r"|cold(?:[- ]start)?|冷启动|无缓存|冷|首次",
        ),
    ),
    (
        "warm",
        _re(
            r"(?:exact )?(?:prefix[- ]|kv[- ]?)?cache[- ]hits?|prefix[- ]hits?|fully cached|cached|warm",
            r"|缓存命中|命中缓存|前缀命中|热启动|热|二次",
        ),
    ),
)
TIER = (
    ("host", _re(r"(?:pinned )?(?:host|cpu) (?:memory|ram)|dram|主机内存|内存")),
    ("disk", _re(r"nvme|ssds?|disks?|磁盘|硬盘|固态")),
    ("device", _re(r"hbm|vram|gpu memory|device memory|显存")),
)
FLAGS = (
    (
        "shared",
        True,
        _re(
            r"(?:the )?same (?:document|prompt|prefix)|(?:one )?shared(?: document| prefix| prompt)?|one document",
            r"|同一(?:份|个)?(?:文档|前缀)|共享(?:文档|前缀)?",
        ),
    ),
    (
        "shared",
        False,
        _re(
            r"distinct(?: documents?| contexts?| prompts?)?|different (?:documents?|contexts?|prompts?)",
            r"|不同(?:的)?(?:文档|上下文|前缀)",
        ),
    ),
    (
        "together",
        True,
        _re(
            r"simultaneous(?:ly)?|at the same (?:time|moment)|(?:all )?at once|(?:in a )?burst|arriv\w* together",
            r"|同时(?:到达)?",
        ),
    ),
    (
        "together",
        False,
        _re(r"(?:arrivals? )?spread(?: arrivals?)?|one (?:by one|after (?:the )?(?:other|another))|错开|陆续"),
    ),
    ("ids", True, _re(r"(?:pre-?tokeni[sz]ed|token[- ]ids)(?: ids)?|已分词")),
)
SCOPE = (
    (
        "user",
        _re(
            r"(?:per|each|every|a|/)\s*(?:user|stream|request|req|session)s?\b|each|single[- ](?:user|stream)",
            r"|(?:单|每)(?:个)?(?:用户|路|并发|请求|流)",
        ),
    ),
    ("gpu", _re(r"(?:per|each|every|a|/)\s*(?:gpu|card)s?\b|(?:单|每)(?:张|块)?卡|卡均")),
    (
        "total",
        _re(
            r"in (?:all|total)|total|overall|aggregated?|altogether|system",
            r"|总(?:吞吐(?:量)?|计|共)?|合计|整机",
        ),
    ),
)
OF = (
    ("input", _re(r"input|prompt|prefill|输入|预填充")),
    ("output", _re(r"output|decod(?:e|ing)|generat(?:ion|ed|ing|es)|输出|解码|生成")),
)

# Words without meaning for a claim. Whatever is none of these and in no pattern above is refused.
FILLER = _words(
    """a an the and or with on at in for of to from by is are was we it our its get gets got reach reaches reached
    achieve achieves achieved serve serves served serving run runs running can support supports supported claim
    claims claimed deepseek nvidia gpu gpus card cards node nodes machine machines server servers box tokens token
    tok context contexts ctx length long model models latency throughput speed decode decoding prefill inference
    llm ai using use up only just less than under below about around over per each long-context prompt prompts
    input output request requests time be has have one single total fits fit holds hold full sec via as that this
    x document documents"""
)
FILLER_ZH = _words(
    """只需要 只需 只要 仅需 仅 需要 需 在 上 的 下 和 与 用 跑 运行 支持 可以 可 能 达到 达 实现 使用 部署 推理 模型
    满血版 满血 服务 服务器 机器 长文本 长上下文 上下文 延迟 时延 吞吐量 吞吐 速度 时 了 为 是 约 大约 左右 以内
    内 每 个 张 块 卡 台 单机 整机 英伟达 显卡 条件 情况 性能 单 机 里 中 到 输入 输出 解码 生成 预填充 请求 用户
    文档 及 就 有 降到 低至 不到 版 处理 读 第一 首"""
)
COUNTS_ZH = {"单": 1, "一": 1, "两": 2, "双": 2, "二": 2, "三": 3, "四": 4, "六": 6, "八": 8, "十六": 16}
COUNTS_EN = {"one": 1, "a": 1, "single": 1, "two": 2, "four": 4, "eight": 8, "sixteen": 16}
FORMS = (
    "lengths (512K, 1M, 524288 tokens, 100万), first token 168 ms (TTFT, 首字, 首token), TPOT 45 ms, 30 tok/s per "
    "user, 20k tok/s total, 16k input tok/s, 100 concurrent (streams, 并发, 路), 98% hit, suffix 32, cold, warm, from "
    "host memory, 8xH20-96 (2x8xH200, 8卡H20), DeepSeek-V3.2 (R1, V4-Flash, ...), TP8, vLLM, p99, same document, "
    "simultaneous"
)
