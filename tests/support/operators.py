"""Operators of torch's that take from an adapter just the keywords that its list names."""


def hold(packet, listed, wanted=()):
    """Have an operator refuse calls by other keywords, until the packet is looked up anew.

    Its kernel can't tell: torch doesn't hand on what equals its default.

    Args:
        packet: `torch.ops.<namespace>.<name>`.
        listed: what an adapter looks for when it loads the operator.
        wanted: what it may pass beyond that, as it has to.
    """
    operator = packet.default

    def run(**given):
        assert given.keys() == {*listed, *wanted}, f"{packet} is given other keywords than it is checked for"
        return operator(**given)

    run._schema = operator._schema
    packet.default = run
