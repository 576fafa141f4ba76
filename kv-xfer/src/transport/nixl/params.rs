//! Parameters of a backend, as NIXL reads them.

use std::ffi::{CStr, CString};

use nixl_sys::c_string;

/// NIXL's parameter for settings of UCX: `NAME=value,NAME=value`, where `NAME` is that of a variable without `UCX_`. NIXL takes it apart at commas,
/// leaves out what has no `=`, and leaves out what the variable sets.
const ENGINE: &CStr = c"engine_config";

/// How UCX is to connect over TCP.
///
/// Without waiting: the other way, its default, leaves a freed connection in use when the peer dies meanwhile. Once: a peer that does not
/// take the connection is met afresh instead. And an end that does not acknowledge is given up, which the kernel's own default does after 15 minutes.
const SAFE: [(&str, &str); 3] = [
    ("TCP_CONN_NB", "y"),
    ("TCP_MAX_CONN_RETRIES", "1"),
    ("TCP_USER_TIMEOUT", "5s"),
];

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Params(Vec<(CString, CString)>);

impl Params {
    /// An error in words when NIXL would not understand one.
    pub(super) fn new(params: &[(String, String)]) -> Result<Self, String> {
        let mut these = Self(Vec::new());
        for (name, value) in params {
            these.set(name, value)?;
        }
        if let Some(lost) = these.for_ucx().find(|part| !part.contains('=')) {
            return Err(format!(
                "engine_config={}: NIXL takes that apart at commas and leaves {lost:?} out; for a list set UCX's variable, such as UCX_TLS",
                these.engine()
            ));
        }
        Ok(these)
    }

    pub(super) fn as_slice(&self) -> &[(CString, CString)] {
        &self.0
    }

    /// Sets a parameter; the error, in words, is another value that it has.
    pub(super) fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let c_name = c_string("parameter name", name).map_err(|e| e.to_string())?;
        let c_value = c_string("parameter", value).map_err(|e| e.to_string())?;
        match self.0.iter().find(|(given, _)| *given == c_name) {
            None => self.0.push((c_name, c_value)),
            Some((_, given)) if *given == c_value => {}
            Some((_, given)) => {
                let given = given.to_string_lossy();
                return Err(format!("the backend's parameter {name}={given}"));
            }
        }
        Ok(())
    }

    fn engine(&self) -> String {
        let found = self.0.iter().find(|(name, _)| name.as_c_str() == ENGINE);
        found.map_or_else(String::new, |(_, value)| {
            value.to_string_lossy().into_owned()
        })
    }

    /// The parts of `engine_config`.
    fn for_ucx(&self) -> impl Iterator<Item = String> {
        let engine = self.engine();
        let parts = engine.split(',').filter(|part| !part.is_empty());
        let parts: Vec<_> = parts.map(str::to_owned).collect();
        parts.into_iter()
    }

    /// Adds a setting of UCX; the error, in words, is another value that it has.
    pub(super) fn set_for_ucx(&mut self, name: &str, value: &str) -> Result<(), String> {
        let given = self.for_ucx().find_map(|part| {
            let (given, value) = part.split_once('=')?;
            (given == name).then(|| value.to_owned())
        });
        match given {
            Some(given) if given == value => return Ok(()),
            Some(given) => {
                return Err(format!(
                    "the backend's parameter engine_config, with {name}={given}"
                ));
            }
            None => {}
        }
        let mut engine = self.engine();
        if !engine.is_empty() {
            engine.push(',');
        }
        engine = format!("{engine}{name}={value}");
        let engine = c_string("engine_config", &engine).map_err(|e| e.to_string())?;
        match self
            .0
            .iter_mut()
            .find(|(name, _)| name.as_c_str() == ENGINE)
        {
            Some((_, value)) => *value = engine,
            None => self.0.push((ENGINE.to_owned(), engine)),
        }
        Ok(())
    }

    /// Has UCX connect over TCP as is safe, where the caller does not say otherwise.
    pub(super) fn connect_safely(&mut self) -> Result<(), String> {
        let given: Vec<String> = self.for_ucx().collect();
        for (name, value) in SAFE {
            let says = |part: &String| part.split_once('=').is_some_and(|(given, _)| given == name);
            if !given.iter().any(says) {
                self.set_for_ucx(name, value)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(engine: &str) -> Result<Params, String> {
        Params::new(&[
            ("engine_config".to_owned(), engine.to_owned()),
            ("num_workers".to_owned(), "2".to_owned()),
        ])
    }

    #[test]
    fn what_the_caller_says_of_ucx_stays() {
        let mut these = params("MAX_RMA_RAILS=4,TCP_USER_TIMEOUT=9s").unwrap();
        these.connect_safely().unwrap();
        assert_eq!(
            these.engine(),
            "MAX_RMA_RAILS=4,TCP_USER_TIMEOUT=9s,TCP_CONN_NB=y,TCP_MAX_CONN_RETRIES=1"
        );
        these.set_for_ucx("TLS", "sm").unwrap();
        these.set_for_ucx("TLS", "sm").unwrap();
        assert!(these.engine().ends_with("RETRIES=1,TLS=sm"));
        let clash = these.set_for_ucx("TLS", "tcp").unwrap_err();
        assert!(clash.contains("TLS=sm"), "{clash}");
        assert_eq!(these.as_slice().len(), 2);
        let mut none = Params::new(&[]).unwrap();
        none.connect_safely().unwrap();
        assert_eq!(
            none.engine(),
            "TCP_CONN_NB=y,TCP_MAX_CONN_RETRIES=1,TCP_USER_TIMEOUT=5s"
        );
    }

    #[test]
    fn a_list_that_nixl_would_cut_short_is_refused() {
        let why = params("TLS=rc,ud,cuda_copy").unwrap_err();
        assert!(why.contains("\"ud\"") && why.contains("UCX_TLS"), "{why}");
        let twice = [
            ("a".to_owned(), "1".to_owned()),
            ("a".to_owned(), "2".to_owned()),
        ];
        assert!(Params::new(&twice).is_err());
        assert!(params("TLS=s\0m").is_err());
    }
}
