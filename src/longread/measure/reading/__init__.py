"""Synthetic reading: long documents with many similar facts, questions about them and exact answers.

Needs the standard library only, so that training, demo and evaluation share it everywhere.
"""

from longread.measure.reading.documents import DOMAINS, LANGUAGES, Document, Line, write
from longread.measure.reading.questions import KINDS, Question, ask

__all__ = ["DOMAINS", "KINDS", "LANGUAGES", "Document", "Line", "Question", "ask", "write"]
