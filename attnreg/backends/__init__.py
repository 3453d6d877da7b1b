"""The backends that come with attnreg: every module of this folder that has a `BACKEND` is one."""
