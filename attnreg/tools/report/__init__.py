"""`attnreg report`: what a program's attention did, as tables and as an HTML page, from its processes' lines.

`lines` reads and joins the lines, `gains` says what could be faster, `charts` draws, `page` writes the page,
`text` makes the tables of a terminal.
May import: `drawing` and all below it. Read `page.py` first.
"""

BEGIN_OF_LINE = '{"program": '  # of what each process writes, so that no other file is taken for it
