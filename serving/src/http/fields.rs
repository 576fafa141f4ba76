//! Fields of a JSON body, with errors that name the field.

use serde_json::{Map, Value};

use super::error::ApiError;

/// The fields of a body. An absent field and a null one are the same.
#[derive(Debug, Clone, Copy)]
pub struct Fields<'a>(pub &'a Map<String, Value>);

impl<'a> Fields<'a> {
    /// A field as it is.
    #[must_use]
    pub fn get(self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn typed<T>(
        self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let read = read(value);
        read.map(Some)
            .ok_or_else(|| ApiError::field(name, format!("{name} must be {expected}")))
    }

    /// A text.
    ///
    /// # Errors
    /// [`ApiError`] when it is something else.
    pub fn text(self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.typed(name, "a string", Value::as_str)
    }

    /// True or false.
    ///
    /// # Errors
    /// [`ApiError`] when it is something else.
    pub fn flag(self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", Value::as_bool)
    }

    /// A number within limits.
    ///
    /// # Errors
    /// [`ApiError`] when it is something else.
    pub fn number(self, name: &str, min: f64, max: f64) -> Result<Option<f32>, ApiError> {
        let expected = format!("a number from {min} to {max}");
        self.typed(name, &expected, |value| {
            let number = value.as_f64()?;
            (min..=max).contains(&number).then_some(number as f32)
        })
    }

    /// A whole number within limits.
    ///
    /// # Errors
    /// [`ApiError`] when it is something else.
    pub fn whole(self, name: &str, min: i64, max: i64) -> Result<Option<i64>, ApiError> {
        let expected = format!("a whole number from {min} to {max}");
        self.typed(name, &expected, |value| {
            let whole = value.as_i64()?;
            (min..=max).contains(&whole).then_some(whole)
        })
    }

    /// A count of at least `min`.
    ///
    /// # Errors
    /// [`ApiError`] when it is something else.
    pub fn count(self, name: &str, min: u64) -> Result<Option<usize>, ApiError> {
        let expected = format!("a whole number of at least {min}");
        self.typed(name, &expected, |value| {
            let count = value.as_u64().filter(|count| *count >= min)?;
            Some(usize::try_from(count).unwrap_or(usize::MAX))
        })
    }
}
