"""Code and logs with planted findings: functions with a known weakness among safe twins, incidents among daily lines.

Knows what a weakness and an incident look like, and how each is asked about. Addresses are private ones or kept for
documentation (RFC 1918, RFC 5737), so none is anybody's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from longread.measure.reading.grammar import words


@dataclass(frozen=True, slots=True)
class Weakness:
    """``bad`` and ``safe``: bodies of a function, lines over ``{n}``; ``asked``: by language."""

    name: str
    bad: tuple[str, ...]
    safe: tuple[str, ...]
    asked: dict[str, str]


WEAKNESSES: Final = (
    Weakness(
        "sql injection",
        (
            "    query = \"SELECT * FROM {n}s WHERE owner = '\" + request.args['owner'] + \"'\"",
            "    return db.execute(query)",
        ),
        ('    query = "SELECT * FROM {n}s WHERE owner = ?"', "    return db.execute(query, (request.args['owner'],))"),
        {
            "en": "Which function joins text that comes from the request into an SQL statement? Name the function.",
            "zh": "哪个函数用请求中的文本拼接出 SQL 语句？请写出函数名。",
        },
    ),
    Weakness(
        "command injection",
        ("    line = f\"convert {{request.args['name']}} out.png\"", "    return subprocess.run(line, shell=True)"),
        ("    line = ['convert', request.args['name'], 'out.png']", "    return subprocess.run(line, check=True)"),
        {
            "en": "Which function passes text from the request to a shell? Name the function.",
            "zh": "哪个函数把请求中的文本交给 shell 执行？请写出函数名。",
        },
    ),
    Weakness(
        "path traversal",
        ("    target = os.path.join(UPLOADS, request.args['file'])", "    return open(target, 'rb').read()"),
        (
            "    target = os.path.realpath(os.path.join(UPLOADS, request.args['file']))",
            "    if not target.startswith(UPLOADS + os.sep):",
            "        raise PermissionError(target)",
            "    return open(target, 'rb').read()",
        ),
        {
            "en": "Which function opens a file whose name comes from the request without checking that it stays in its "
            "folder? Name the function.",
            "zh": "哪个函数打开由请求指定的文件，却没有检查它是否仍在目录之内？请写出函数名。",
        },
    ),
    Weakness(
        "unsafe deserialisation",
        ("    body = request.get_data()", "    return pickle.loads(body)"),
        ("    body = request.get_data()", "    return json.loads(body)"),
        {
            "en": "Which function unpickles data that comes from the request? Name the function.",
            "zh": "哪个函数对请求中的数据做 pickle 反序列化？请写出函数名。",
        },
    ),
    Weakness(
        "no certificate check",
        ("    return requests.get({n}.callback, verify=False, timeout=5)",),
        ("    return requests.get({n}.callback, verify=True, timeout=5)",),
        {
            "en": "Which function makes an HTTPS request with the certificate check switched off? Name the function.",
            "zh": "哪个函数在发出 HTTPS 请求时关闭了证书校验？请写出函数名。",
        },
    ),
    Weakness(
        "weak password hash",
        ("    digest = hashlib.md5({n}.password.encode()).hexdigest()", "    return store.save({n}.number, digest)"),
        ("    digest = scrypt_of({n}.password, salt_of({n}))", "    return store.save({n}.number, digest)"),
        {
            "en": "Which function stores a password as an MD5 digest? Name the function.",
            "zh": "哪个函数用 MD5 摘要保存口令？请写出函数名。",
        },
    ),
    Weakness(
        "evaluated input",
        ("    return eval(request.args['filter'], {{'{n}': {n}}})",),
        ("    return ast.literal_eval(request.args['filter'])",),
        {
            "en": "Which function evaluates an expression from the request as code? Name the function.",
            "zh": "哪个函数把请求中的表达式当作代码求值？请写出函数名。",
        },
    ),
    Weakness(
        "predictable token",
        ("    token = str(random.randint(0, 999999))", "    return mail({n}.owner, token)"),
        ("    token = secrets.token_urlsafe(32)", "    return mail({n}.owner, token)"),
        {
            "en": "Which function makes a token with a predictable random generator? Name the function.",
            "zh": "哪个函数用可预测的随机数生成令牌？请写出函数名。",
        },
    ),
)
USERS: Final = words("""
    akira bela chloe dario elif farah goran hanna ines jonas katya lars mirek nadia oskar petra quentin rosa sven tomas
    ulla vera wanda xenia yusuf zora
""")
HOSTS: Final = words("web-01 web-02 web-03 db-01 db-02 cache-01 mail-01 build-01 build-02 file-01 vpn-01 proxy-01")
DAILY: Final = (
    "{h} sshd[{p}]: Accepted publickey for {u} from 192.168.{a}.{b} port {o}",
    "{h} sshd[{p}]: Failed password for {u} from 10.20.{a}.{b} port {o}",
    "{h} sshd[{p}]: Connection closed by {i} port {o}",
    "{h} cron[{p}]: job nightly-{o} finished with status 0",
    "{h} nginx[{p}]: {i} GET /items/{o} 200",
    "{h} nginx[{p}]: {i} POST /items/{o} 403",
    "{h} backup[{p}]: sent {m} MB to {i}",
    "{h} usermod[{p}]: user {u} added to group staff",
    "{h} firewall[{p}]: ACCEPT {i} to port 443",
    "{h} kernel: disk sda temperature {t} C",
)
INCIDENTS: Final = {
    "break-in": {
        "en": "From which address did a login succeed after many failed ones from that same address?",
        "zh": "从哪个地址在多次登录失败之后又登录成功？",
    },
    "exfiltration": {
        "en": "To which address were more than 5,000 MB sent in one transfer?",
        "zh": "有一次传输超过 5,000 MB，它发往哪个地址？",
    },
    "privilege": {
        "en": "Which user was added to the group wheel?",
        "zh": "哪个用户被加入了 wheel 组？",
    },
    "cleared log": {
        "en": "Which user cleared the audit log?",
        "zh": "哪个用户清空了审计日志？",
    },
    "port scan": {
        "en": "From which address were many different ports of one host tried and dropped?",
        "zh": "从哪个地址尝试了同一主机的许多不同端口并被丢弃？",
    },
}


def daily(rng: Random) -> str:
    """A line that means nothing, without its time. Logins fail from other networks than they succeed from: in a long
    log an address would else come to have many failures and a success by chance.
    """
    return rng.choice(DAILY).format(
        h=rng.choice(HOSTS),
        p=1000 + rng.randrange(9000),
        u=rng.choice(USERS),
        i=f"198.51.100.{1 + rng.randrange(254)}",
        o=1024 + rng.randrange(60_000),
        a=rng.randrange(256),
        b=1 + rng.randrange(254),
        m=1 + rng.randrange(400),
        t=25 + rng.randrange(30),
    )


def incident(name: str, address: str, user: str, rng: Random) -> tuple[list[str], str]:
    """Lines of an incident in order, and the answer. Addresses of incidents are none of the daily lines'."""
    host = rng.choice(HOSTS)
    if name == "break-in":
        failed = [
            f"{host} sshd[{2000 + n}]: Failed password for {user} from {address} port {40_000 + n}" for n in range(14)
        ]
        return [*failed, f"{host} sshd[2014]: Accepted password for {user} from {address} port 40014"], address
    if name == "port scan":
        ports = [22 + 37 * n + rng.randrange(37) for n in range(16)]
        return [f"{host} firewall[811]: DROP {address} to port {port}" for port in ports], address
    if name == "exfiltration":
        return [
            f"{host} backup[{3000 + rng.randrange(999)}]: sent {5100 + rng.randrange(4000)} MB to {address}"
        ], address
    if name == "privilege":
        return [f"{host} usermod[{3000 + rng.randrange(999)}]: user {user} added to group wheel"], user
    return [f"{host} auditd[{3000 + rng.randrange(999)}]: audit log cleared by {user}"], user


def decoy(name: str, address: str, user: str, rng: Random) -> list[str]:
    """Lines that look like an incident and are none: many failures and no success, a few dropped ports."""
    host = rng.choice(HOSTS)
    if name == "break-in":
        return [
            f"{host} sshd[{4000 + n}]: Failed password for {user} from {address} port {50_000 + n}" for n in range(9)
        ]
    if name == "port scan":
        return [f"{host} firewall[812]: DROP {address} to port 23" for _ in range(3)]
    if name == "exfiltration":
        return [f"{host} backup[{5000 + rng.randrange(999)}]: sent {400 + rng.randrange(500)} MB to {address}"]
    if name == "privilege":
        return [f"{host} usermod[{5000 + rng.randrange(999)}]: user {user} removed from group staff"]
    return [f"{host} auditd[{5000 + rng.randrange(999)}]: audit log rotated by {user}"]


def functions(weak: Sequence[Weakness], names: Sequence[str], bad: bool, nouns: Sequence[str]) -> list[tuple[str, ...]]:
    """A function for each weakness, as lines."""
    return [
        (f"def {name}(request, {noun}):\n", *(line.format(n=noun) + "\n" for line in (each.bad if bad else each.safe)))
        for each, name, noun in zip(weak, names, nouns, strict=True)
    ]
