"""Made-up text, always the same for a name."""

from __future__ import annotations

import random

_WHO = "a clockmaker,the river guild,a printer,two surveyors,the harbour office,a glass works,an astronomer".split(",")
_DID = "rebuilt,sold,measured,described,lost,copied,moved,repaired,inspected,painted,borrowed,catalogued".split(",")
_KIND = "iron,wooden,narrow,public,northern,unfinished,famous,second,stone,little-known,floating,private".split(",")
_WHAT = "bridge,archive,lighthouse,canal,mill,observatory,market hall,map,ferry,kiln,tower,library".split(",")
_WHERE = "Arden,Bellmoor,Castel,Dunwick,Eastry,Farholt,Gravel Bay,Hexley,Ilmar,Jorvik,Kestrel,Lindow".split(",")
_WHY = "after a flood,for a low price,before the war,on a wet morning,without leave,by candlelight".split(",")


def sentences(name: str, words: int) -> str:
    """Return sentences of at least so many words."""
    draw = random.Random(name)
    made: list[str] = []
    count = 0
    while count < words:
        who, did, kind, what, where, why = (draw.choice(of) for of in (_WHO, _DID, _KIND, _WHAT, _WHERE, _WHY))
        year, item = draw.randint(1500, 1999), draw.randint(1, 9999)
        made.append(f"In {year} {who} {did} the {kind} {what} of {where} {why}, as item {item} says.")
        count += len(made[-1].split())
    return " ".join(made)
