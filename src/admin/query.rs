//! What stands behind the `?` of a path, and names within a path: both may be percent-encoded. A key that nobody knows is refused,
//! since a misspelt one would silently do nothing.

use std::str::FromStr;

use percent_encoding::percent_decode_str;

/// The text that is percent-encoded in `encoded`; `None` if it is no UTF-8.
pub(super) fn decoded(encoded: &str) -> Option<String> {
    percent_decode_str(encoded).decode_utf8().ok().map(|text| text.into_owned())
}

/// The keys of a query and their values.
pub(super) struct Query(Vec<(String, String)>);

impl Query {
    /// Of these keys each may be there once.
    ///
    /// # Errors
    /// With a line that names the key.
    pub(super) fn read(query: Option<&str>, keys: &[&str]) -> Result<Query, String> {
        let mut pairs: Vec<(String, String)> = Vec::new();
        for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let (Some(key), Some(value)) = (decoded(key), decoded(value)) else {
                return Err("the query: must be UTF-8, percent-encoded\n".to_owned());
            };
            if !keys.contains(&key.as_str()) {
                return Err(format!("{}: unknown; there are: {}\n", key.escape_debug(), keys.join(" ")));
            }
            if pairs.iter().any(|(known, _)| *known == key) {
                return Err(format!("{key}: is there twice\n"));
            }
            pairs.push((key, value));
        }
        Ok(Query(pairs))
    }

    pub(super) fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == key).map(|(_, value)| value.as_str())
    }

    /// A number; `default` if it is absent.
    ///
    /// # Errors
    /// With a line that names the key.
    pub(super) fn number<N: FromStr>(&self, key: &str, default: N) -> Result<N, String> {
        let parse = |value: &str| value.parse().map_err(|_| format!("{key}: must be a number\n"));
        self.get(key).map_or(Ok(default), parse)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(query: &str) -> Result<Query, String> {
        Query::read(Some(query), &["path", "mode"])
    }

    #[test]
    fn values_come_plain_or_encoded() {
        for query in ["path=/v1/x&mode=a", "path=%2Fv1%2fx&mode=%61", "mode=a&&p%61th=/v1/x"] {
            let query = read(query).ok().unwrap();
            assert_eq!((query.get("path"), query.get("mode")), (Some("/v1/x"), Some("a")));
        }
        assert!(Query::read(None, &[]).is_ok());
        assert_eq!(read("mode").ok().unwrap().get("mode"), Some(""));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (query, complaint) in [
            ("mod=kv", "mod: unknown; there are: path mode\n"),
            ("mode=a&mode=b", "mode: is there twice\n"),
            ("mode=%ff", "the query: must be UTF-8, percent-encoded\n"),
        ] {
            assert_eq!(read(query).err().unwrap(), complaint);
        }
        let query = Query::read(Some("last=x"), &["last"]).ok().unwrap();
        assert_eq!(query.number("last", 1).unwrap_err(), "last: must be a number\n");
        assert_eq!(query.number("most", 7), Ok(7));
    }
}
