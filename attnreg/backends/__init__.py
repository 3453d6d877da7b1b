"""The backends that come with attnreg: each module or package here that has a `BACKEND` is one.

No other room names one: `registry.entries` finds them. A backend may import `errors`, `settings`,
`torchlib`, `contract` and its own folder, and its kernel package only inside functions. Read
`fa2/README.md` first, then `docs/adding-a-backend.md`.
"""
