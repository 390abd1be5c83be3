"""English: a financial report, a technical manual and a formulary of made-up medicines.

Knows words only. No company, machine or medicine of these names is meant: figures and doses are drawn.
"""

from longread.measure.reading.grammar import words
from longread.measure.workloads.genre import Genre, Quantity, Rule

PEOPLE = tuple(
    f"{first} {last}"
    for last in words("""
        Aldana Bergstrom Castellan Duvall Eriksen Falkner Gruber Holmqvist Ivanova Jaramillo Kowalczyk Lindholm
        Marchetti Nakagawa Oduya Pellegrin Quist Rosenthal Sandoval Thorvald Ullman Vasquez Weatherby Yamauchi
    """)
    for first in ("Ms", "Mr")
)
JOINS = (", ", " and ")

REPORT = Genre(
    name="report",
    language="en",
    title="Consolidated annual report no. {n}, figures of all segments as audited.",
    headings=(
        "Note {n}. Segment information",
        "Note {n}. Results of operations",
        "Note {n}. Assets and liabilities",
        "Note {n}. Governance and responsibilities",
    ),
    firsts=words("""
        Nordic Baltic Iberian Alpine Adriatic Danube Rhine Hanseatic Celtic Aegean Levant Andean Pacific Atlantic
        Arctic Boreal Saharan Zambezi Mekong Deccan Himalayan Caspian Ural Siberian Caribbean Patagonian Amazon
        Appalachian Prairie Sonoran Yukon Tasman Coral Sunda Malacca Formosa Kyushu Hokkaido
    """),
    seconds=words("""
        Cables Turbines Logistics Chemicals Ceramics Optics Forestry Shipping Foods Textiles Batteries Railways
        Polymers Instruments Telecom Insurance Leasing Retail Packaging Robotics Semiconductors Aviation Cement
        Fertilisers Glass Hydraulics Lighting Mining Paper Pharmaceuticals Printing Refining Software Steel Storage
        Tooling Water Waste Wind Solar Paints Footwear Furniture Cosmetics Brewing Dairy Grain Fisheries Toys Media
    """),
    numbered=False,
    entity="{x} {y}",
    periods=("FY2018", "FY2019", "FY2020", "FY2021", "FY2022", "FY2023", "FY2024", "FY2025"),
    quantities=(
        Quantity("external revenue", "EUR {v} million", 1000, 999_999, 1),
        Quantity("operating profit", "EUR {v} million", 100, 99_999, 1),
        Quantity("capital expenditure", "EUR {v} million", 100, 89_999, 1),
        Quantity("net debt", "EUR {v} million", 500, 499_999, 1),
        Quantity("order intake", "USD {v} thousand", 10_000, 9_999_999),
        Quantity("average headcount", "{v} employees", 120, 48_000),
        Quantity("gross margin", "{v} percent", 51, 689, 1),
        Quantity("effective tax rate", "{v} percent", 105, 389, 1),
        Quantity("inventory days", "{v} days", 12, 260),
        Quantity("pension liability", "EUR {v} million", 100, 59_999, 1),
        Quantity("power consumption", "{v} MWh", 1200, 880_000),
        Quantity("research spending", "EUR {v} million", 10, 9999, 1),
    ),
    roles=("budget owner", "audit partner", "risk officer", "works council delegate"),
    people=PEOPLE,
    rules=(
        Rule(
            "goodwill impairment",
            "A goodwill impairment was recognised on {e} in the reporting period.",
            "No goodwill impairment was recognised on {e} in the reporting period.",
            "Was a goodwill impairment recognised on {e} in the reporting period?",
        ),
        Rule(
            "pledge",
            "The receivables of {e} are pledged to the lenders.",
            "The receivables of {e} are not pledged to the lenders.",
            "Are the receivables of {e} pledged to the lenders?",
        ),
        Rule(
            "sale",
            "The supervisory board has approved a sale of {e}.",
            "The supervisory board has not approved a sale of {e}.",
            "Has the supervisory board approved a sale of {e}?",
        ),
    ),
    states=(
        "The {a} of {e} in {p} came to {v}.",
        "In {p}, {e} recorded a figure of {v} under {a}.",
        "| {e} | {a} | {p} | {v} |",
        "For {e}, the auditors confirmed {v} as {a} in {p}.",
    ),
    assigns=(
        "{v} is the {a} of {e}.",
        "The {a} of {e} is {v}.",
        "At {e}, the duties of the {a} are carried by {v}.",
    ),
    amends=(
        "Restatement {n}: the {a} of {e} in {p} is corrected to {v}.",
        "Restatement {n}: for {e}, the {a} in {p} now reads {v}.",
    ),
    fillers=(
        "Management considers the market position of {e} to be sound and expects demand to follow the wider economy.",
        "The accounting policies applied to {e} are unchanged and are set out in the general part of these notes.",
        "Currency effects on {e} were hedged in accordance with the treasury guideline of the group.",
        "Forward-looking statements about {e} are subject to risks that cannot be predicted with certainty.",
        "Transactions between {e} and other segments are made at arm's length and are eliminated on consolidation.",
        "Rounding differences may occur in the tables.",
    ),
    short=(
        "See the general notes.",
        "Unaudited remarks follow.",
        "End of note.",
        "Reserved.",
        "This page has been left blank intentionally by the publisher of the report.",
    ),
    key="the {a} of {e} in {p}",
    role_key="the {a} of {e}",
    what=("What is {k}?", "State {k}.", "How high is {k}?"),
    who=("Who is {k}?", "Name {k}."),
    latest=("After all restatements, what is {k}?", "What does {k} read after the restatement?"),
    all_of=("State {k}.", "What are {k}?"),
    joins=JOINS,
)

MANUAL = Genre(
    name="manual",
    language="en",
    title="Operation and maintenance manual, edition {n}. Read all safety notes before work begins.",
    headings=(
        "Chapter {n}. Technical data",
        "Chapter {n}. Maintenance",
        "Chapter {n}. Safety and permitted work",
        "Chapter {n}. Commissioning",
    ),
    firsts=words("""
        Pump Valve Compressor Gearbox Boiler Chiller Conveyor Separator Centrifuge Blower Mixer Condenser Evaporator
        Extruder Turbine Generator Transformer Filter Hoist Press Reactor Agitator Dryer Furnace
    """),
    seconds=words("A B C D E F G H K L M N P R S T"),
    numbered=True,
    entity="{x} {y}-{n}",
    periods=("",),
    quantities=(
        Quantity("maximum operating pressure", "{v} bar", 15, 3200, 1),
        Quantity("flange tightening torque", "{v} Nm", 12, 980),
        Quantity("oil charge", "{v} litres", 8, 2400, 1),
        Quantity("inspection interval", "{v} operating hours", 120, 24_000),
        Quantity("supply voltage", "{v} V", 24, 690),
        Quantity("maximum bearing temperature", "{v} °C", 55, 145),
        Quantity("radial clearance", "{v} mm", 4, 290, 2),
        Quantity("grease dose", "{v} g per 1,000 hours", 5, 480),
        Quantity("inhibitor dose", "{v} ml per cubic metre", 12, 990, 1),
        Quantity("permitted vibration", "{v} mm/s", 11, 112, 1),
        Quantity("coolant flow", "{v} l/min", 12, 2400),
        Quantity("dry weight", "{v} kg", 40, 18_000),
    ),
    roles=("responsible fitter", "isolation supervisor", "inspection contractor", "lubrication technician"),
    people=PEOPLE,
    rules=(
        Rule(
            "solvent",
            "{e} may be cleaned with solvent.",
            "{e} must not be cleaned with solvent.",
            "May {e} be cleaned with solvent?",
        ),
        Rule(
            "hot work",
            "Hot work on {e} is permitted under a written permit.",
            "Hot work on {e} is not permitted, even under a written permit.",
            "Is hot work on {e} permitted under a written permit?",
        ),
        Rule(
            "dry running",
            "{e} is suited to dry running.",
            "{e} is not suited to dry running.",
            "Is {e} suited to dry running?",
        ),
    ),
    states=(
        "The {a} of {e} is {v}.",
        "{e}: {a} {v}.",
        "| {e} | {a} | {v} |",
        "On {e}, observe a value of {v} for the {a}.",
    ),
    assigns=(
        "{v} is the {a} of {e}.",
        "The {a} of {e} is {v}.",
        "At {e}, the duties of the {a} are carried by {v}.",
    ),
    amends=(
        "Erratum {n}: the {a} of {e} is corrected to {v}.",
        "Erratum {n}: for {e}, the {a} now reads {v}.",
    ),
    fillers=(
        "Before any work on {e}, switch off the drive, lock it against restart and check that it is free of pressure.",
        "Spare parts of {e} are listed in the parts catalogue; quote the serial number with each order.",
        "Unusual noise from {e} must be reported to the control room without delay.",
        "Keep the surroundings of {e} dry, well lit and free of loose objects.",
        "After work on {e} has ended, refit all guards and record the work in the log book.",
        "Wear eye and hearing protection in marked areas.",
    ),
    short=(
        "See safety notes.",
        "Wear gloves.",
        "Caution.",
        "End of page.",
        "This page has been left blank intentionally by the publisher of the manual.",
    ),
    key="the {a} of {e}",
    role_key="the {a} of {e}",
    what=("What is {k}?", "State {k}.", "I need {k} with its unit."),
    who=("Who is {k}?", "Name {k}."),
    latest=("After all errata, what is {k}?", "What does {k} read after the erratum?"),
    all_of=("State {k}.", "What are {k}?"),
    joins=JOINS,
)

FORMULARY = Genre(
    name="formulary",
    language="en",
    title="Hospital formulary, edition {n}. The medicines in it are made up; no dose applies to a real one.",
    headings=(
        "Section {n}. Dosing",
        "Section {n}. Preparation and storage",
        "Section {n}. Contraindications",
        "Section {n}. Responsibilities",
    ),
    firsts=words("""
        Bren Cal Dor Fen Gal Hel Jor Kel Lum Mer Nol Ost Pra Quel Rav Sel Tor Ulm Ven Wex Xan Yor Zel Arb Bos Cyn Drov
        Erm Flin Gry Huv Irv Jasp Kron Luv Morv Nev Opl Pyr Rost Sulv Tark Urb Vost
    """),
    seconds=words("""
        adazole ibrine ocept umycin etrol axone ilide orane uzumab estine alfen idryl onavir utide epram actone iprost
        orphan ulose emide arbine ithin oxetan usparin azine ectil idone omer ulast yxin avane erone
    """),
    numbered=False,
    entity="{x}{y}",
    periods=(
        "in adults",
        "in children",
        "in renal impairment",
        "in hepatic impairment",
        "in pregnancy",
        "in the elderly",
        "in dialysis",
        "in intensive care",
    ),
    quantities=(
        Quantity("starting dose", "{v} mg", 5, 900),
        Quantity("maintenance dose", "{v} mg/kg", 2, 480, 1),
        Quantity("maximum daily dose", "{v} mg", 40, 4000),
        Quantity("loading dose", "{v} micrograms", 25, 950),
        Quantity("infusion rate", "{v} ml/h", 5, 980, 1),
        Quantity("dosing interval", "{v} hours", 2, 96),
        Quantity("dilution volume", "{v} ml", 10, 990),
        Quantity("target plasma level", "{v} mmol/l", 3, 290, 1),
        Quantity("treatment duration", "{v} days", 2, 180),
        Quantity("observation time", "{v} minutes", 10, 600),
    ),
    roles=("prescribing consultant", "checking pharmacist", "ward contact"),
    people=PEOPLE,
    rules=(
        Rule(
            "alcohol",
            "{e} may be taken with alcohol.",
            "{e} must not be taken with alcohol.",
            "May {e} be taken with alcohol?",
        ),
        Rule(
            "crushing",
            "Tablets of {e} may be crushed.",
            "Tablets of {e} must not be crushed.",
            "May tablets of {e} be crushed?",
        ),
        Rule(
            "driving",
            "Driving is allowed under treatment with {e}.",
            "Driving is not allowed under treatment with {e}.",
            "Is driving allowed under treatment with {e}?",
        ),
    ),
    states=(
        "The {a} of {e} {p} is {v}.",
        "{e} {p}: {a} {v}.",
        "| {e} | {a} | {p} | {v} |",
        "For {e}, the committee set {v} as {a} {p}.",
    ),
    assigns=(
        "{v} is the {a} for {e}.",
        "The {a} for {e} is {v}.",
        "For {e}, the duties of the {a} are carried by {v}.",
    ),
    amends=(
        "Correction {n}: the {a} of {e} {p} is changed to {v}.",
        "Correction {n}: for {e}, the {a} {p} now reads {v}.",
    ),
    fillers=(
        "Record every administration of {e} in the chart at the time at which it is given.",
        "Store {e} in its original packaging, away from light and out of the reach of children.",
        "Report suspected adverse reactions to {e} to the drug safety office.",
        "The pharmacy supplies {e} on prescription only.",
        "Check the patient's identity and allergies.",
    ),
    short=(
        "See the chart.",
        "Ask the pharmacy.",
        "Caution.",
        "End of page.",
        "This page has been left blank intentionally by the publisher of the formulary.",
    ),
    key="the {a} of {e} {p}",
    role_key="the {a} for {e}",
    what=("What is {k}?", "State {k}.", "I need {k} with its unit."),
    who=("Who is {k}?", "Name {k}."),
    latest=("After all corrections, what is {k}?", "What does {k} read after the correction?"),
    all_of=("State {k}.", "What are {k}?"),
    joins=JOINS,
)
