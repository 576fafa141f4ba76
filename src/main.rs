//! `kvx`, the command-line tool of kv-xfer.
use kvx::runtime;

fn main() {
    match runtime::resolve() {
        Ok(found) => println!("{found:?}"),
        Err(error) => println!("{error}"),
    }
}
