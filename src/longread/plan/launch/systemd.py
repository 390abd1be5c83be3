"""A launch as systemd units: one a process, each a whole file under the name in its first line."""

from longread.plan.launch.command import USER, Flag, Launch, Options, Process, cache_folder
from longread.plan.launch.shell import comment, header
from longread.spec.errors import ConfigError
from longread.spec.hardware import GIB

_SPECIAL = " \t\"'\\;"


def systemd(launch: Launch, options: Options) -> str:
    """Units of all nodes one after the other."""
    return "\n".join(_unit(launch, options, p) for p in launch.processes)


def unit_name(launch: Launch, process: Process) -> str:
    suffix = f"-{process.replica}" if len({p.replica for p in launch.processes}) > 1 else ""
    part = f"-node{process.node}" if launch.nodes > 1 else ""
    return f"{launch.engine}{suffix}{part}.service"


def _unit(launch: Launch, options: Options, p: Process) -> str:
    name = unit_name(launch, p)
    where = f", on node {p.node} ({options.address(p.node)})" if launch.nodes > 1 else ""
    lines = [f"# /etc/systemd/system/{name}{where}", *header(launch), "", "[Unit]"]
    title = f"{launch.title}: {launch.engine} {launch.version}".rstrip()
    lines += [f"Description={title.replace('%', '%%')}"]
    if launch.gpus:
        lines += [
            *comment("keeps the driver loaded, or the first start waits for it", ""),
            "Wants=nvidia-persistenced.service",
        ]
        lines += ["After=network-online.target nvidia-persistenced.service"]
    else:
        lines += ["After=network-online.target"]
    lines += [
        "Wants=network-online.target",
        "StartLimitIntervalSec=1h",
        "StartLimitBurst=5",
        "",
        "[Service]",
        "Type=exec",
    ]
    lines += [f"User={USER}"]
    folder = cache_folder(launch.engine).removeprefix("/var/cache/")
    lines += [*comment("made under /var/cache and given to the user", ""), f"CacheDirectory={folder}"]
    for v in (*launch.variables, *p.variables):
        lines += [*comment(v.why, ""), f"Environment={_quote(f'{v.name}={v.value}')}"]
    lines += _command(launch, p)
    lines += _limits(launch)
    return "\n".join([*lines, "", "[Install]", "WantedBy=multi-user.target"]) + "\n"


def _command(launch: Launch, p: Process) -> list[str]:
    """systemd skips comment lines between continued ones, so that each flag keeps its reason."""
    flags: list[Flag] = [*launch.flags, *p.flags]
    first = " ".join(_quote(word) for word in launch.program[1:])
    lines = [f"ExecStart=/opt/{launch.engine}/bin/{launch.program[0]} {first} \\"]
    for index, flag in enumerate(flags):
        end = " \\" if index < len(flags) - 1 else ""
        lines += [*comment(flag.why, ""), f"  {' '.join(_quote(word) for word in flag.words)}{end}"]
    return lines


def _limits(launch: Launch) -> list[str]:
    host = f": {launch.host_bytes / GIB:.0f} GiB of host cache and" if launch.host_bytes else ":"
    lines = [*comment("a crash loses what is running, not the service", ""), "Restart=on-failure", "RestartSec=10"]
    lines += [*comment("workers get the signal from the main process; what is left after that is killed", "")]
    lines += ["KillMode=mixed", "TimeoutStopSec=60"]
    lines += [*comment(f"pinned memory is locked{host} RDMA buffers", ""), "LimitMEMLOCK=infinity"]
    lines += [*comment("a socket a client and files of all shards", ""), "LimitNOFILE=1048576"]
    return [*lines, *comment("NCCL's and the loader's threads", ""), "TasksMax=infinity"]


def _quote(word: str) -> str:
    """One word for systemd: its specifiers (%) and variables ($) doubled, quoted where it must be."""
    if not word.isprintable() and word:
        raise ConfigError(f"{word[:80]!r} holds control characters, which no unit can hold")
    text = word.replace("%", "%%").replace("$", "$$")
    if text and not any(character in _SPECIAL for character in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
