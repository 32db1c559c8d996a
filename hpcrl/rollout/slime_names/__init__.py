"""What functions written for slime or vime import and get: `GenerateState`, `post`, graders and args; their `Sample` is
`hpcrl.sample.Sample`.

`config/foreign_imports.py` says under which of their names each is found.  Everything here is hpcrl's own code; the
engines are asked through the endpoint, whose keys and limits hold as for every custom function.
"""
