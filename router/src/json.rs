//! JSON objects of which only top-level fields are read or changed; all else keeps its bytes.
//!
//! Requests and answers pass through a router that knows few of their fields. Parsing them into a tree
//! and writing them out again would change numbers, escapes and the order of keys (which reaches the
//! prompt, by tool schemas). Here a value is never more than the text that it came as.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Error as _, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

/// The fields of an object, in order, as text.
#[derive(Debug, Clone, Default)]
pub(crate) struct Fields<'a>(Vec<(Cow<'a, str>, Cow<'a, RawValue>)>);

impl<'a> Fields<'a> {
    /// Reads an object.
    pub fn parse(text: &'a str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// Reads an object that is UTF-8.
    pub fn parse_bytes(bytes: &'a [u8]) -> Result<Self, serde_json::Error> {
        Self::parse(std::str::from_utf8(bytes).map_err(serde_json::Error::custom)?)
    }

    /// The value of the last field of that name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0
            .iter()
            .rev()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.get())
    }

    /// The last field of that name, as a `T`; `None` where there is no such field, or where it is
    /// `null`.
    pub fn read<T: for<'de> Deserialize<'de>>(
        &self,
        name: &str,
    ) -> Result<Option<T>, serde_json::Error> {
        self.get(name)
            .map_or(Ok(None), serde_json::from_str::<Option<T>>)
    }

    /// Takes all fields of that name out, and gives back the last one's value.
    pub fn remove(&mut self, name: &str) -> Option<String> {
        let value = self.get(name).map(str::to_owned);
        if value.is_some() {
            self.0.retain(|(key, _)| key != name);
        }
        value
    }

    /// Makes `value` the value of the only field of that name, where the first of that name was.
    pub fn set(&mut self, name: &'static str, value: Box<RawValue>) {
        let place = self.0.iter().position(|(key, _)| key == name);
        self.remove(name);
        let place = place.unwrap_or(self.0.len());
        self.0
            .insert(place, (Cow::Borrowed(name), Cow::Owned(value)));
    }

    /// The object as text.
    pub fn to_text(&self) -> String {
        // Writing text and raw values into memory cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// The JSON of `value`.
pub(crate) fn raw<T: Serialize + ?Sized>(value: &T) -> Box<RawValue> {
    serde_json::value::to_raw_value(value).unwrap_or_else(|_| RawValue::NULL.to_owned())
}

/// Whether `text`, which is one JSON value, is an object.
pub(crate) fn is_object(text: &str) -> bool {
    text.trim_start().starts_with('{')
}

#[derive(Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;

        impl<'de> Visitor<'de> for Object {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = Vec::new();
                while let Some((Key(key), value)) = map.next_entry::<Key<'de>, &'de RawValue>()? {
                    fields.push((key, Cow::Borrowed(value)));
                }
                Ok(Fields(fields))
            }
        }

        deserializer.deserialize_map(Object)
    }
}

impl Serialize for Fields<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (key, value) in &self.0 {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_keep_their_bytes_and_order() {
        let text = r#"{"z":1.10,"big":123456789012345678901234567890,"a":{"y":"\u00e9","x":[ 1 , 2]},"s":"\/"}"#;
        assert_eq!(Fields::parse(text).unwrap().to_text(), text);
    }

    #[test]
    fn of_fields_that_come_twice_the_last_counts() {
        let mut fields = Fields::parse(r#"{"a":1,"b":2,"a":3}"#).unwrap();
        assert_eq!(fields.get("a"), Some("3"));
        fields.set("a", raw(&4));
        assert_eq!(fields.to_text(), r#"{"a":4,"b":2}"#);
        assert_eq!(fields.remove("a").as_deref(), Some("4"));
        assert_eq!(fields.remove("a"), None);
        assert_eq!(fields.to_text(), r#"{"b":2}"#);
    }

    #[test]
    fn escaped_keys_are_seen() {
        let fields = Fields::parse(r#"{"\u0061":1}"#).unwrap();
        assert_eq!(fields.get("a"), Some("1"));
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for text in ["", "[]", "1", "null", "{", r#"{"a":}"#, "{}x", r#"{1:2}"#] {
            assert!(Fields::parse(text).is_err(), "{text}");
        }
        assert!(Fields::parse_bytes(b"{\"a\":\"\xff\"}").is_err());
    }
}
