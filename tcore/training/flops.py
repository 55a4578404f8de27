"""How much arithmetic a sample costs, from the settings alone."""

from tcore.config import Config


def flops_per_sample(config: Config) -> float:
    """Floating-point operations of one sample in a step, a multiply-add counted as 2.

    Work that is skipped is not counted: auxiliary views of crops without a mask, frame tokens through the
    head twice, patches that nobody wants of the last block. Stochastic depth is counted in full;
    recomputation is not counted.

    >>> from tcore import recipe
    >>> [round(flops_per_sample(recipe(name)) / 1e9) for name in ("vits16-k400", "vitb16-k400")]
    [156, 544]
    """
    views, vit, head, matching = config.views, config.vit, config.head, config.matching
    large, small = ((size // vit.patch_size) ** 2 for size in (views.global_size, views.local_size))
    sides = {"none": 0, "past": 1, "future": 1, "both": 2}[config.auxiliary]
    masked = 2 * config.masking.probability
    holes = masked * large * sum(config.masking.ratio) / 2

    def encoder(patches: int, frame_only: bool = False) -> float:
        tokens = patches + 1 + vit.num_registers
        embed = 2 * patches * 3 * vit.patch_size**2 * vit.dim
        blocks = vit.depth * (24 * tokens * vit.dim**2 + 4 * tokens**2 * vit.dim)
        # The last block makes keys and values of all tokens, and all else of one.
        skipped = (tokens - 1) * (20 * vit.dim**2 + 4 * tokens * vit.dim)
        return embed + blocks - frame_only * skipped

    match = matching.num_blocks * (18 * large * vit.dim**2 + 8 * large**2 * vit.dim)
    row = 2 * (
        vit.dim * head.hidden
        + head.hidden**2
        + head.hidden * head.bottleneck
        + head.bottleneck * head.prototypes
    )
    teacher = 2 * encoder(large) + (2 + holes) * row
    auxiliary = masked * sides * encoder(large)
    # Forward once, backward twice as much.
    student = 3 * (masked * encoder(large) + (2 - masked) * encoder(large, frame_only=True))
    student += 3 * views.num_local * encoder(small, frame_only=True)
    student += 3 * (masked * sides * match + (2 + views.num_local + max(1, sides) * holes) * row)
    return teacher + auxiliary + student
