"""``accelerate launch``, where torchvision may lack its operators, which it imports with transformers.

``python -m tests.distributed.accelerate_launch`` and its options.
"""

from ingot.lab.torchvision_ops import make_torchvision_importable

if __name__ == "__main__":
    make_torchvision_importable()
    from accelerate.commands.launch import main

    main()
