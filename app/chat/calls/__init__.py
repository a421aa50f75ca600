"""Tool calls in the answer of a model: the records of their formats, their reader, and their grammars.

records    how each format writes calls
source     the text of an answer, as it arrives
reading    reads calls from the text and streams their arguments
values     arguments that are not JSON in the text
writing    the grammar of calls, and example calls
harmony    the markers of gpt-oss
constraint starts a grammar where an answer begins a call
"""
