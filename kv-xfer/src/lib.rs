//! KV-block transfer engine.
