"""Torch ops that take from an adapter only the keywords that it has checked them for."""


def hold(packet, listed, wanted=()):
    """Have an op refuse calls by other keywords, until the packet is looked up anew.

    Its kernel can't check that: torch doesn't hand on arguments that equal their defaults.

    Args:
        packet: `torch.ops.<namespace>.<name>`.
        listed: the keywords that an adapter looks for when it loads the op.
        wanted: further ones without a default, which it has to pass.
    """
    op = packet.default

    def run(**given):
        assert given.keys() == {*listed, *wanted}, f"{packet} is given other keywords than it is checked for"
        return op(**given)

    run._schema = op._schema
    packet.default = run
