//! The cases that a process was told.

use std::collections::HashMap;

use super::error::WorkerError;

/// Which blocks go where.
#[derive(Debug, Clone, Default)]
pub struct BlockLists {
    /// At the holder.
    pub remote: Vec<u32>,
    /// At the reader.
    pub local: Vec<u32>,
}

/// Cases by name, each with what a participant keeps about it.
#[derive(Debug)]
pub struct Cases<T> {
    by_name: HashMap<String, T>,
}

impl<T> Default for Cases<T> {
    fn default() -> Self {
        Self {
            by_name: HashMap::new(),
        }
    }
}

impl<T> Cases<T> {
    /// Keeps a case, in place of one of the same name.
    pub fn put(&mut self, name: String, case: T) {
        self.by_name.insert(name, case);
    }

    /// A case.
    ///
    /// # Errors
    /// [`WorkerError::Case`] when there is none of that name.
    pub fn get(&self, name: &str) -> Result<&T, WorkerError> {
        self.by_name.get(name).ok_or_else(|| unknown(name))
    }

    /// A case, to be changed.
    ///
    /// # Errors
    /// [`WorkerError::Case`] when there is none of that name.
    pub fn get_mut(&mut self, name: &str) -> Result<&mut T, WorkerError> {
        self.by_name.get_mut(name).ok_or_else(|| unknown(name))
    }

    /// All of them, to be changed.
    pub fn all_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.by_name.values_mut()
    }
}

fn unknown(name: &str) -> WorkerError {
    WorkerError::Case {
        name: name.to_owned(),
        why: "it was not told".to_owned(),
    }
}

/// Checks that a list names at least one block and none outside of a pool.
///
/// # Errors
/// [`WorkerError::Case`].
pub fn check_list(name: &str, list: &[u32], blocks: u32) -> Result<(), WorkerError> {
    let refuse = |why| {
        Err(WorkerError::Case {
            name: name.to_owned(),
            why,
        })
    };
    if list.is_empty() {
        return refuse("it has no blocks".to_owned());
    }
    match list.iter().find(|block| **block >= blocks) {
        Some(block) => refuse(format!(
            "block {block} is outside the pool of {blocks} blocks"
        )),
        None => Ok(()),
    }
}

/// Checks both lists of a case for a reader.
///
/// # Errors
/// [`WorkerError::Case`].
pub fn check_lists(name: &str, lists: &BlockLists, blocks: u32) -> Result<(), WorkerError> {
    check_list(name, &lists.remote, blocks)?;
    check_list(name, &lists.local, blocks)?;
    let (remote, local) = (lists.remote.len(), lists.local.len());
    if remote != local {
        return Err(WorkerError::Case {
            name: name.to_owned(),
            why: format!("{remote} blocks cannot go to {local}"),
        });
    }
    Ok(())
}
