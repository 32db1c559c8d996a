"""Forms in which models write tool calls, one a file, chosen by the marks that the model's chat template shows.

A form has `MARKS`, the texts by which a template shows it, and `find(text, tools)`, which finds its calls; what stands
around all calls of a turn is in `WRAPPERS`, and `ARGUMENTS_AS_TEXT` says that the template reads arguments as JSON
text, not as an object. `call_forms.py` chooses, `call_values.py` has what forms share.
"""
