"""Benchmarks, quality gates and reports over HTTP, and this machine's own rates. A part imports only from lines above:

    intervals, files, located_toml     quantiles and shares; files that appear whole; TOML with its line numbers
    result                             what a measurement carries to be believed
    reading, arrivals                  synthetic documents with questions and answers; which requests come when
    workloads                          what is asked, how long it is, what is right
    gate                               are the answers what they were, or what another server's are
    quality                            a gate's verdict inside a measurement of speed
    load                               one load on one server: schedule, streams, metrics, the result's files
    started                            a server that is started, watched, killed
    sweep, profile, stress, report     many loads; where the TTFT goes; pressure; results compared and shown
    experiment                         server options by workloads by gates
    calls                              records of a server's last calls
    explain, standing                  why a call reused no more; where one stands
    trace                              a call drawn as a waterfall
    planned_cost                       a deployment's steps by the planner
    simulate                           the real schedule on a virtual clock
    simulation_report                  its figures
    probe_rates, probe_disk            what memory, matrix units, links and disks reach
    probe_card                         a card from what was measured
    probe                              this machine as hardware for the planner
    worker, served                     one engine in a process; one server in a process
    cpu, demo                          against transformers on this CPU; a reader shown cold and warm

``tests/null/test_rooms_imports.py`` holds the code to this.
"""
