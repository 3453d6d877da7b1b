"""`attnreg report`: one HTML page of what a program's attention did, from the lines of its processes.

`lines` reads and joins the lines, `gains` says what could be faster, `charts` draws, `page` writes the page.
May import: `drawing` and all below it. Read `page.py` first.
"""
