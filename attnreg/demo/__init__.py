"""The demo's main job: train on real text, packed and padded, and compare what comes of it."""
