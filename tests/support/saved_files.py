"""What people send from a machine: the formats as their programs write them, the values made up.

``smi_xml`` and ``SMI_TEXT`` are nvidia-smi 580's for cards on NVSwitch, shortened to what is read.
"""

GPU_XML = """\t<gpu id="00000000:{bus}:00.0">
\t\t<product_name>{name}</product_name>
\t\t<product_brand>NVIDIA</product_brand>
\t\t<product_architecture>Hopper</product_architecture>
\t\t<display_mode>Requested functionality has been deprecated</display_mode>
\t\t<persistence_mode>Enabled</persistence_mode>
\t\t<mig_mode>
\t\t\t<current_mig>Disabled</current_mig>
\t\t\t<pending_mig>Disabled</pending_mig>
\t\t</mig_mode>
\t\t<uuid>GPU-00000000-0000-0000-0000-0000000000{bus}</uuid>
\t\t<gpu_recovery_action>None</gpu_recovery_action>
\t\t<pci>
\t\t\t<pci_bus_id>00000000:{bus}:00.0</pci_bus_id>
\t\t\t<pci_gpu_link_info>
\t\t\t\t<pcie_gen>
\t\t\t\t\t<max_link_gen>5</max_link_gen>
\t\t\t\t\t<current_link_gen>5</current_link_gen>
\t\t\t\t\t<device_current_link_gen>5</device_current_link_gen>
\t\t\t\t\t<max_device_link_gen>5</max_device_link_gen>
\t\t\t\t\t<max_host_link_gen>5</max_host_link_gen>
\t\t\t\t</pcie_gen>
\t\t\t\t<link_widths>
\t\t\t\t\t<max_link_width>16x</max_link_width>
\t\t\t\t\t<current_link_width>16x</current_link_width>
\t\t\t\t</link_widths>
\t\t\t</pci_gpu_link_info>
\t\t\t<replay_counter>0</replay_counter>
\t\t</pci>
\t\t<fan_speed>N/A</fan_speed>
\t\t<clocks_event_reasons>
\t\t\t<clocks_event_reason_gpu_idle>Not Active</clocks_event_reason_gpu_idle>
\t\t\t<clocks_event_reason_applications_clocks_setting>Not Active</clocks_event_reason_applications_clocks_setting>
\t\t\t<clocks_event_reason_sw_power_cap>Not Active</clocks_event_reason_sw_power_cap>
\t\t\t<clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
\t\t\t<clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
\t\t\t<clocks_event_reason_hw_power_brake_slowdown>Not Active</clocks_event_reason_hw_power_brake_slowdown>
\t\t\t<clocks_event_reason_sync_boost>Not Active</clocks_event_reason_sync_boost>
\t\t\t<clocks_event_reason_sw_thermal_slowdown>Not Active</clocks_event_reason_sw_thermal_slowdown>
\t\t</clocks_event_reasons>
\t\t<clocks_event_reasons_counters>
\t\t\t<clocks_event_reasons_counters_sw_power_cap>4999562 us</clocks_event_reasons_counters_sw_power_cap>
\t\t\t<clocks_event_reasons_counters_sw_therm_slowdown>0 us</clocks_event_reasons_counters_sw_therm_slowdown>
\t\t\t<clocks_event_reasons_counters_hw_therm_slowdown>0 us</clocks_event_reasons_counters_hw_therm_slowdown>
\t\t</clocks_event_reasons_counters>
\t\t<fb_memory_usage>
\t\t\t<total>97871 MiB</total>
\t\t\t<reserved>616 MiB</reserved>
\t\t\t<used>0 MiB</used>
\t\t\t<free>97255 MiB</free>
\t\t</fb_memory_usage>
\t\t<compute_mode>Default</compute_mode>
\t\t<utilization>
\t\t\t<gpu_util>99 %</gpu_util>
\t\t\t<memory_util>40 %</memory_util>
\t\t</utilization>
\t\t<ecc_mode>
\t\t\t<current_ecc>Enabled</current_ecc>
\t\t\t<pending_ecc>Enabled</pending_ecc>
\t\t</ecc_mode>
\t\t<ecc_errors>
\t\t\t<volatile>
\t\t\t\t<sram_correctable>0</sram_correctable>
\t\t\t\t<sram_uncorrectable_parity>0</sram_uncorrectable_parity>
\t\t\t\t<sram_uncorrectable_secded>0</sram_uncorrectable_secded>
\t\t\t\t<dram_correctable>0</dram_correctable>
\t\t\t\t<dram_uncorrectable>0</dram_uncorrectable>
\t\t\t</volatile>
\t\t\t<aggregate>
\t\t\t\t<sram_uncorrectable_parity>0</sram_uncorrectable_parity>
\t\t\t\t<sram_uncorrectable_secded>0</sram_uncorrectable_secded>
\t\t\t\t<dram_uncorrectable>0</dram_uncorrectable>
\t\t\t\t<sram_threshold_exceeded>No</sram_threshold_exceeded>
\t\t\t</aggregate>
\t\t</ecc_errors>
\t\t<remapped_rows>
\t\t\t<remapped_row_corr>0</remapped_row_corr>
\t\t\t<remapped_row_unc>0</remapped_row_unc>
\t\t\t<remapped_row_pending>No</remapped_row_pending>
\t\t\t<remapped_row_failure>No</remapped_row_failure>
\t\t\t<row_remapper_histogram>
\t\t\t\t<row_remapper_histogram_max>2560 bank(s)</row_remapper_histogram_max>
\t\t\t\t<row_remapper_histogram_none>0 bank(s)</row_remapper_histogram_none>
\t\t\t</row_remapper_histogram>
\t\t</remapped_rows>
\t\t<temperature>
\t\t\t<gpu_temp>41 C</gpu_temp>
\t\t\t<gpu_temp_tlimit>46 C</gpu_temp_tlimit>
\t\t\t<gpu_temp_slow_tlimit_threshold>-2 C</gpu_temp_slow_tlimit_threshold>
\t\t\t<memory_temp>35 C</memory_temp>
\t\t</temperature>
\t\t<gpu_power_readings>
\t\t\t<power_state>P0</power_state>
\t\t\t<average_power_draw>308.53 W</average_power_draw>
\t\t\t<instant_power_draw>310.61 W</instant_power_draw>
\t\t\t<current_power_limit>400.00 W</current_power_limit>
\t\t\t<requested_power_limit>400.00 W</requested_power_limit>
\t\t\t<default_power_limit>400.00 W</default_power_limit>
\t\t\t<max_power_limit>400.00 W</max_power_limit>
\t\t</gpu_power_readings>
\t\t<module_power_readings>
\t\t\t<current_power_limit>N/A</current_power_limit>
\t\t</module_power_readings>
\t\t<clocks>
\t\t\t<graphics_clock>1980 MHz</graphics_clock>
\t\t\t<sm_clock>1980 MHz</sm_clock>
\t\t\t<mem_clock>2619 MHz</mem_clock>
\t\t</clocks>
\t\t<applications_clocks>
\t\t\t<graphics_clock>1980 MHz</graphics_clock>
\t\t</applications_clocks>
\t\t<default_applications_clocks>
\t\t\t<graphics_clock>1980 MHz</graphics_clock>
\t\t</default_applications_clocks>
\t\t<max_clocks>
\t\t\t<sm_clock>1980 MHz</sm_clock>
\t\t\t<mem_clock>2619 MHz</mem_clock>
\t\t</max_clocks>
\t\t<fabric>
\t\t\t<state>Completed</state>
\t\t\t<status>Success</status>
\t\t\t<cliqueId>0</cliqueId>
\t\t\t<health>
\t\t\t\t<summary>Healthy</summary>
\t\t\t\t<bandwidth>Full</bandwidth>
\t\t\t\t<route_unhealthy>False</route_unhealthy>
\t\t\t\t<incorrect_configuration>None</incorrect_configuration>
\t\t\t</health>
\t\t</fabric>
\t\t<processes>
\t\t\t<process_info>
\t\t\t\t<pid>4242</pid>
\t\t\t\t<type>C</type>
\t\t\t\t<process_name>/usr/bin/python3</process_name>
\t\t\t</process_info>
\t\t\t<process_info>
\t\t\t\t<pid>99</pid>
\t\t\t\t<type>G</type>
\t\t\t\t<process_name>/usr/lib/xorg/Xorg</process_name>
\t\t\t</process_info>
\t\t</processes>
\t</gpu>
"""


def smi_xml(gpus: int = 2, name: str = "NVIDIA H20", changes: dict[str, tuple[str, str]] | None = None) -> str:
    """``changes``: by element name, (old text, new text), of GPU 0 only."""
    cards = [GPU_XML.format(bus=f"{0x19 + 8 * index:02X}", name=name) for index in range(gpus)]
    for element, (old, new) in (changes or {}).items():
        before, after = f"<{element}>{old}</{element}>", f"<{element}>{new}</{element}>"
        assert before in cards[0], before
        cards[0] = cards[0].replace(before, after)
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">\n<nvidia_smi_log>\n'
        "\t<timestamp>Sun Nov 29 21:59:25 2026</timestamp>\n\t<driver_version>580.95.05</driver_version>\n"
        f"\t<cuda_version>13.0</cuda_version>\n\t<attached_gpus>{gpus}</attached_gpus>\n"
        + "".join(cards)
        + "\n</nvidia_smi_log>\n"
    )


SMI_TEXT = """
==============NVSMI LOG==============

Timestamp                                              : Sun Nov 29 21:59:25 2026
Driver Version                                         : 580.95.05
CUDA Version                                           : 13.0

Attached GPUs                                          : 1
GPU 00000000:19:00.0
    Product Name                                       : NVIDIA H20-3e
    Product Architecture                               : Hopper
    Persistence Mode                                   : Disabled
    MIG Mode
        Current                                        : Disabled
        Pending                                        : Disabled
    GPU UUID                                           : GPU-00000000-0000-0000-0000-000000000019
    GPU Recovery Action                                : None
    PCI
        Bus                                            : 0x19
        Bus Id                                         : 00000000:19:00.0
        GPU Link Info
            PCIe Generation
                Max                                    : 5
                Current                                : 4
                Device Current                         : 4
                Device Max                             : 5
            Link Width
                Max                                    : 16x
                Current                                : 8x
        Replays Since Reset                            : 12
    Clocks Event Reasons
        Idle                                           : Not Active
        SW Power Cap                                   : Active
        HW Slowdown                                    : Active
            HW Thermal Slowdown                        : Active
            HW Power Brake Slowdown                    : Not Active
        SW Thermal Slowdown                            : Not Active
    Clocks Event Reasons Counters
        SW Thermal Slowdown                            : 70000000 us
        HW Thermal Slowdown                            : 5000000 us
    FB Memory Usage
        Total                                          : 143771 MiB
        Reserved                                       : 616 MiB
        Used                                           : 1000 MiB
        Free                                           : 142156 MiB
    BAR1 Memory Usage
        Total                                          : 262144 MiB
        Used                                           : 1 MiB
    Compute Mode                                       : Exclusive_Process
    Utilization
        GPU                                            : 97 %
        Memory                                         : 50 %
    ECC Mode
        Current                                        : Enabled
        Pending                                        : Disabled
    ECC Errors
        Volatile
            SRAM Correctable                           : 0
            SRAM Uncorrectable Parity                  : 0
            SRAM Uncorrectable SEC-DED                 : 1
            DRAM Correctable                           : 3
            DRAM Uncorrectable                         : 2
        Aggregate
            SRAM Uncorrectable Parity                  : 0
            SRAM Uncorrectable SEC-DED                 : 1
            DRAM Uncorrectable                         : 4
            SRAM Threshold Exceeded                    : No
    Remapped Rows
        Correctable Error                              : 0
        Uncorrectable Error                            : 1
        Pending                                        : Yes
        Remapping Failure Occurred                     : No
        Bank Remap Availability Histogram
            Max                                        : 3071 bank(s)
            None                                       : 0 bank(s)
    Temperature
        GPU Current Temp                               : 86 C
        GPU T.Limit Temp                               : 1 C
        GPU Slowdown T.Limit Temp                      : -2 C
        Memory Current Temp                            : 88 C
    GPU Power Readings
        Average Power Draw                             : 350.53 W
        Instantaneous Power Draw                       : 351.29 W
        Current Power Limit                            : 350.00 W
        Default Power Limit                            : 500.00 W
        Max Power Limit                                : 500.00 W
    Module Power Readings
        Current Power Limit                            : N/A
    Clocks
        Graphics                                       : 990 MHz
        SM                                             : 990 MHz
        Memory                                         : 3201 MHz
    Applications Clocks
        Graphics                                       : 1980 MHz
    Default Applications Clocks
        Graphics                                       : 1980 MHz
    Max Clocks
        SM                                             : 1980 MHz
        Memory                                         : 3201 MHz
    Fabric
        State                                          : In Progress
        Status                                         : N/A
        CliqueId                                       : N/A
    Processes                                          : None
"""

TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\tSYS\t0-47,96-143\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tPIX\tSYS\t0-47,96-143\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tSYS\tPIX\t48-95,144-191\t1\t\tN/A\n"
    "NIC0\tPIX\tPIX\tSYS\t X \tSYS\n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
)
PEERS = (
    " \t\x1b[4mGPU0\tGPU1\tGPU2\t\x1b[0m\n GPU0\tX\tOK\tCNS\t\n GPU1\tOK\tX\tCNS\t\n GPU2\tCNS\tCNS\tX\t\n\n"
    "Legend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n"
)
NVLINK = (
    "GPU 0: NVIDIA H200 (UUID: GPU-00000000-0000-0000-0000-000000000019)\n"
    "\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
    "GPU 1: NVIDIA H200 (UUID: GPU-00000000-0000-0000-0000-000000000021)\n"
    "\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
)
COLLECT_ENV = """Collecting environment information...
==============================
        System Info
==============================
OS                           : Ubuntu 22.04.5 LTS (x86_64)
GCC version                  : (Ubuntu 11.4.0-1ubuntu1~22.04.2) 11.4.0
Libc version                 : glibc-2.35

==============================
       PyTorch Info
==============================
PyTorch version              : 2.13.0+cu130
Is debug build               : False
CUDA used to build PyTorch   : 13.0
ROCM used to build PyTorch   : N/A

==============================
      Python Environment
==============================
Python version               : 3.12.11 (main, Jun  4 2025, 08:56:18) [GCC 11.4.0] (64-bit runtime)
Python platform              : Linux-5.15.0-60-generic-x86_64-with-glibc2.35

==============================
       CUDA / GPU Info
==============================
Is CUDA available            : True
CUDA runtime version         : Could not collect
GPU models and configuration :
GPU 0: NVIDIA H20
GPU 1: NVIDIA H20

Nvidia driver version        : 550.127.08
cuDNN version                : Could not collect

==============================
          CPU Info
==============================
Architecture:                            x86_64
CPU(s):                                  192
Model name:                              INTEL(R) XEON(R) PLATINUM 8558
Flags:                                   fpu vme sse sse2 avx2 avx512f amx_tile
NUMA node(s):                            2

==============================
Versions of relevant libraries
==============================
[pip3] flashinfer-python==0.6.14
[pip3] nvidia-nccl-cu13==2.28.9
[pip3] torch==2.13.0+cu130
[pip3] transformers==5.7.0
[conda] Could not collect

==============================
         vLLM Info
==============================
ROCM Version                 : Could not collect
vLLM Version                 : 0.26.0 (git sha: abcdef)
vLLM Build Flags:
  CUDA Archs: Not Set; ROCm: Disabled; XPU: Disabled
GPU Topology:
  \tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\t0-47\t0\t\tN/A
GPU1\tNV18\t X \t0-47\t0\t\tN/A

Legend:

  X    = Self

==============================
     Environment Variables
==============================
NCCL_P2P_DISABLE=1
VLLM_API_KEY=sk-secret
LD_LIBRARY_PATH=/usr/local/cuda/lib64
"""
CHECK_ENV = """Python: 3.12.11 (main, Jun  4 2025, 08:56:18) [GCC 11.4.0]
CUDA available: True
GPU 0,1: NVIDIA H20-3e
GPU 0,1 Compute Capability: 9.0
CUDA_HOME: /usr/local/cuda
NVCC: Cuda compilation tools, release 12.9, V12.9.86
CUDA Driver Version: 570.133.20
PyTorch: 2.9.1+cu128
sglang: 0.5.9
sglang-kernel: 0.4.1.post1
sgl_kernel: 0.3.21
flashinfer_python: 0.6.6
flashinfer_cubin: 0.6.5
triton: 3.5.1
vllm: Module Not Found
NVIDIA Topology:
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\t0-47\t0\t\tN/A
GPU1\tNV18\t X \t0-47\t0\t\tN/A

Legend:

  X    = Self

ulimit soft: 1024
"""
DMESG = """[    0.000000] Linux version 5.15.0-60-generic
[12345.678901] NVRM: Xid (PCI:0000:19:00): 79, pid=1896, GPU has fallen off the bus.
[12346.000000] Out of memory: Killed process 4242 (python3) total-vm:1234kB, anon-rss:999kB
"""
