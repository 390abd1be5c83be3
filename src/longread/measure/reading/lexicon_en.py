"""English: words, line templates and question templates of the five domains.

Every spelling of a word costs the readers' tokenizer an entry, so words are shared between domains and a value word
never begins an answer: persons follow ``Dr`` and places ``Port``, and both are copied token by token.
"""

from longread.measure.reading.grammar import QUANTITIES, Grammar, Tongue, pairs, words

FIRSTS = words("""
    Harbour Mill Oak Elm Ash Birch Cedar Maple Pine Willow Hazel Holly Ivy Rose Lily Fern Moss Reed Clover Thistle
    Amber Coral Jade Pearl Opal Ruby Silver Copper Iron Steel Granite Marble Slate Flint Chalk Clay North South East
    West Upper Lower Old New High Long Grand Royal River Lake Brook Spring Ocean Island Valley Hill Ridge Cliff Canyon
    Meadow Forest Desert Summit Eagle Falcon Hawk Raven Heron Swan Robin Crane Fox Wolf Bear Otter Badger Deer Lion
    Tiger Beaver Hare Sun Moon Star Comet Winter Summer Autumn Storm Thunder Frost Cloud Rain Snow Abbey Castle Chapel
    Temple Bishop King Queen Prince Duke Baron Knight Monk Anchor Compass Lantern Beacon Arrow Saddle Wagon Bell Crown
    Shield Harp Drum Violet White
""")
SECONDS = words("""
    Lane Road Street House Hall Yard Dock Depot Bridge Gate Park Court Tower Works Plant Wharf Pier Store Farm Field
    Garden Square Market School Clinic Station Office Lab Hangar Annex Quay Lodge Cellar Studio Arena Barn Vault Garage
    Terrace Mews
""")
PERSONS = words("""
    Keller Berg Novak Silva Rossi Haas Lund Varga Moreau Costa Weber Olsen Kovac Marin Petit Ferrer Jansen Klein
    Lopez Meyer Ortiz Quinn Reyes Sato Tanaka Ueda Vogel Wagner Yilmaz Zhou Adler Brandt
""")
PLACES = words("""
    Alma Vale Dora Ellis Faro Galt Hope Irene Jura Kent Lorne Mara Nevis Orla Perth Quill Ross Sable Tarn Ulva Verne
    Wick Yarrow Zeal Arden Brae Cole Dunn Esk Firth Glen Howe
""")
MONTHS = words("January February March April May June July August September October November December")

CONTRACT = Grammar(
    head="{r}",
    cite="clause {r}",
    lower=False,
    quoted=False,
    attributes=pairs("""
        percent: penalty rate, interest rate, rent discount, profit share
        amount: service fee, cleaning fee, heating fee, monthly rent, security deposit, repair budget
        amount: liability cap, insurance cover
        days: notice period, payment period, grace period, repair period
        date: delivery date, inspection date, renewal date
        code: account number, permit number
        person: site manager, lead engineer
        place: arbitration seat"""),
    lists=pairs("""
        person: authorised agent, key holder
        place: delivery point, storage point"""),
    facts=(
        "{h} The {a} for {e} shall be {v}.\n",
        "{h} For {e}, the {a} agreed by the Parties is {v}.\n",
        "{h} In respect of {e} the {a} is {v}.\n",
    ),
    amended=(
        "{h} Amendment No. {n}: the {a} for {e} shall be {v}.\n",
        "{h} Amendment No. {n}: for {e}, the {a} agreed by the Parties is {v}.\n",
    ),
    first=("{h} As {a} for {e} the Parties name {v}.\n",),
    further=("{h} As {a} for {e}, in addition to {b}, the Parties name {v}.\n",),
    fillers=(
        "{h} Notices under this Agreement shall be given in writing.\n",
        "{h} Neither Party may assign its rights without the consent of the other Party.\n",
        "{h} The Operator shall keep {e} in good order.\n",
        "{h} The Owner gives the Operator access to {e} at all working hours.\n",
        "{h} If a provision is void, the other provisions stay in force.\n",
        "{h} This Agreement is subject to the law of its place of signature.\n",
        "{h} The annex on {e} is part of this Agreement.\n",
    ),
    headings=(
        "Article {n}. Fees and terms\n",
        "Article {n}. Duties of the Operator\n",
        "Article {n}. Rights of the Owner\n",
        "Article {n}. Sites and access\n",
        "Article {n}. Other provisions\n",
    ),
    titles=(
        "Framework Agreement No. {v}, from Article {n}\n",
        "made in writing by Dr {p} of Port {c}, the Owner, and Dr {q} of Port {d}, the Operator, the Parties.\n",
    ),
    keys=("the {a} for {e}", "the {a} of {e}"),
    every=("every {a} for {e}", "each {a} of {e}"),
    nowhere="No clause says it.",
)

STATUTE = Grammar(
    head="§ {r}",
    cite="§ {r}",
    lower=False,
    quoted=False,
    attributes=pairs("""
        amount: licence fee, permit fee, annual levy, parking fine, noise fine, repair grant, heating grant
        amount: building bond
        percent: tax rate, waste rate, water share, green share
        days: appeal period, filing period, closing period
        metres: height limit, width limit
        persons: visitor limit
        date: filing date, audit date, review date
        code: file number
        person: chief warden
        place: registry seat"""),
    lists=pairs("""
        person: deputy warden, sworn expert
        place: polling point, collection point"""),
    facts=(
        "{h} The {a} for {e} is {v}.\n",
        "{h} For {e}, the {a} under this law is {v}.\n",
        "{h} In respect of {e} the {a} shall be {v}.\n",
    ),
    amended=(
        "{h} Revision No. {n}: the {a} for {e} is {v}.\n",
        "{h} Revision No. {n}: for {e}, the {a} under this law is {v}.\n",
    ),
    first=("{h} As {a} for {e} the law names {v}.\n",),
    further=("{h} As {a} for {e}, in addition to {b}, the law names {v}.\n",),
    fillers=(
        "{h} The council shall keep a register of all sites.\n",
        "{h} An appeal against an order shall be given in writing.\n",
        "{h} The rights of the owner of {e} stay in force.\n",
        "{h} The council gives notice of every order on {e}.\n",
        "{h} If a provision is void, the other provisions stay in force.\n",
        "{h} The council may order the inspection of {e}.\n",
        "{h} This law is subject to the annual review.\n",
    ),
    headings=(
        "Part {n}. Fees and terms\n",
        "Part {n}. Duties of the council\n",
        "Part {n}. Rights of the owner\n",
        "Part {n}. Sites and access\n",
        "Part {n}. Other provisions\n",
    ),
    titles=(
        "Law on Sites No. {v}, from § {n}\n",
        "made by the council of Port {c} and Port {d}, signed by Dr {p} and Dr {q}.\n",
    ),
    keys=("the {a} for {e}", "the {a} of {e}"),
    every=("every {a} for {e}", "each {a} of {e}"),
    nowhere="No section says it.",
)

LOG = Grammar(
    head="{r} {t}",
    cite="line {r}",
    lower=True,
    quoted=True,
    attributes=pairs("""
        number: latency, size, rate, status, attempt, port, uptime, load, queue, session, memory, disk
        number: thread, packet
        code: token, trace, build, release
        person: user, owner, operator
        place: region, zone, origin"""),
    lists=pairs("""
        person: visitor, reviewer
        place: mirror, replica"""),
    facts=(
        "{h} INFO {e} {a}={v}\n",
        "{h} INFO {e} reports {a}={v}\n",
        "{h} WARN {e} {a}={v}\n",
    ),
    amended=(
        "{h} INFO {e} {a}={v}\n",
        "{h} WARN {e} {a}={v}\n",
    ),
    first=("{h} INFO {e} {a} first={v}\n",),
    further=("{h} INFO {e} {a} after {b} also={v}\n",),
    fillers=(
        "{h} INFO {e} started\n",
        "{h} INFO {e} stopped\n",
        "{h} WARN {e} is slow\n",
        "{h} INFO all checks passed\n",
        "{h} INFO log file closed, new log file open\n",
        "{h} WARN clock set at start\n",
        "{h} INFO {e} checks passed\n",
    ),
    headings=(),
    titles=(
        "log file of build {v}, from line {n}\n",
        "kept by Dr {p} and Dr {q}, in Port {c} and Port {d}\n",
    ),
    keys=("the {a} of {e}", "the {a} at {e}"),
    every=("every {a} of {e}", "each {a} at {e}"),
    nowhere="No line says it.",
)

CODE = Grammar(
    head="{r} |",
    cite="line {r}",
    lower=True,
    quoted=True,
    attributes=pairs("""
        number: timeout, retry_limit, retry_delay, max_size, min_size, batch_size, page_size, pool_size, cache_size
        number: max_load, port, weight, quota, depth, window, offset
        code: token, build, release
        person: owner, author
        place: region, zone, origin"""),
    lists=pairs("""
        person: reviewer, tester
        place: mirror, replica"""),
    facts=(
        "{h} {e}.{a} = {v}\n",
        "{h} {e}.{a} = {v}  # checked\n",
        "{h} {e}.{a} = {v}  # see annex\n",
    ),
    amended=(
        "{h} {e}.{a} = {v}\n",
        "{h} {e}.{a} = {v}  # checked\n",
    ),
    first=("{h} {e}.{a}.first = {v}\n",),
    further=("{h} {e}.{a}.after[{o}] = {v}\n",),
    fillers=(
        "{h} # all sizes in bytes\n",
        "{h} # checked at start\n",
        "{h} # {e} is slow\n",
        "{h} import {e}\n",
        "{h} # see the annex on {e}\n",
        "{h} # set by the build\n",
        "{h} {e}.start()\n",
    ),
    headings=(),
    titles=(
        "code of build {v}, from line {n}\n",
        "kept by Dr {p} and Dr {q}, in Port {c} and Port {d}\n",
    ),
    keys=("{e}.{a}", "the value of {e}.{a}"),
    every=("every {e}.{a}", "each value of {e}.{a}"),
    nowhere="No line says it.",
)

TABLE = Grammar(
    head="{r} |",
    cite="row {r}",
    lower=False,
    quoted=False,
    attributes=pairs("""
        amount: monthly rent, service fee, cleaning fee, heating fee, repair budget, annual revenue, stock value
        percent: rent discount, profit share, tax rate
        metres: room height, gate width
        persons: staff count, visitor count
        days: payment period, repair period
        date: delivery date, inspection date, audit date
        code: account number, permit number
        person: site manager, lead engineer
        place: supply base"""),
    lists=pairs("""
        person: authorised agent, key holder
        place: delivery point, storage point"""),
    facts=(
        "{h} {e} | {a} | {v} | checked\n",
        "{h} {e} | {a} | {v} | open\n",
        "{h} {e} | {a} | {v} | closed\n",
    ),
    amended=(
        "{h} {e} | {a} | {v} | checked\n",
        "{h} {e} | {a} | {v} | open\n",
    ),
    first=("{h} {e} | {a} | first | {v} | checked\n",),
    further=("{h} {e} | {a} | after {b} | {v} | checked\n",),
    fillers=(
        "{h} {e} | no new entry\n",
        "{h} {e} | see annex\n",
        "{h} {e} | inspection passed\n",
        "{h} {e} | closed\n",
        "{h} all sites | checked\n",
        "{h} page total | see annex\n",
        "{h} new page\n",
    ),
    headings=(),
    titles=(
        "Register of sites No. {v}, from row {n}\n",
        "kept by Dr {p} and Dr {q}, in Port {c} and Port {d}\n",
    ),
    keys=("the {a} for {e}", "the {a} of {e}"),
    every=("every {a} for {e}", "each {a} of {e}"),
    nowhere="No row says it.",
)

_WHAT = ("What is {k}?", "State {k}.", "I need {k}.")

ENGLISH = Tongue(
    firsts=FIRSTS,
    seconds=SECONDS,
    persons=PERSONS,
    places=PLACES,
    months=MONTHS,
    values={
        "amount": "{x} EUR",
        "percent": "{x}.{y} percent",
        "days": "{x} days",
        "metres": "{x} metres",
        "persons": "{x} persons",
        "number": "{x}",
        "date": "{y} {x}",
        "code": "{x}-{y}",
        "person": "Dr {x}",
        "place": "Port {x}",
    },
    yearly="{v} of each year",
    entity="{x} {y}",
    identifier="{x}_{y}",
    single={
        **dict.fromkeys(QUANTITIES, _WHAT),
        "date": _WHAT,
        "code": _WHAT,
        "place": _WHAT,
        "person": ("Who is {k}?", "Name {k}.", "I need {k}."),
    },
    last=("What is the latest on {k}?", "State the latest on {k}.", "What now holds for {k}?"),
    several=("State {k}.", "I need {k}."),
    listing=("List {k}.", "Name {k}."),
    count=("How many lines name {k}?", "Count {l}."),
    joins=(", ", " and "),
    answer="{v} ({c})",
    answers="; ",
    counted="{c}: {n}",
    cites=", ",
    absent="Not in the document.",
    thought="It is in {c}.",
    thoughts="They are in {c}.",
    domains={"contract": CONTRACT, "statute": STATUTE, "log": LOG, "code": CODE, "table": TABLE},
)
