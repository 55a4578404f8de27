"""The checker of shape annotations: beartype, with an int accepted where a float is due."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
