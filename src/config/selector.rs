//! Label selectors, as the API server reads them: `app=vllm,tier in (a,b),!canary`. Kept as text; this only says what is wrong with one
//! before the API server does, which is asked when it may be too late to answer whoever wrote it.

/// What is wrong with a selector.
///
/// # Errors
/// Says which requirement it is and what it lacks.
pub fn check(text: &str) -> Result<(), String> {
    if text.trim().is_empty() {
        return Err("is empty".to_owned());
    }
    for requirement in requirements(text)? {
        let requirement = requirement.trim();
        let shown = if requirement.is_empty() {
            "an empty requirement".to_owned()
        } else {
            format!("`{requirement}`")
        };
        one(requirement).map_err(|why| format!("{shown} {why}"))?;
    }
    Ok(())
}

/// Parts between commas that stand outside of parentheses.
fn requirements(text: &str) -> Result<Vec<&str>, String> {
    let (mut parts, mut from, mut inside) = (Vec::new(), 0, false);
    for (at, c) in text.char_indices() {
        match c {
            '(' if inside => return Err("opens a parenthesis within another".to_owned()),
            '(' => inside = true,
            ')' if !inside => return Err("closes a parenthesis that it has not opened".to_owned()),
            ')' => inside = false,
            ',' if !inside => {
                parts.push(&text[from..at]);
                from = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err("opens a parenthesis and does not close it".to_owned());
    }
    parts.push(&text[from..]);
    Ok(parts)
}

fn one(requirement: &str) -> Result<(), String> {
    if let Some(name) = requirement.strip_prefix('!') {
        return key(name.trim());
    }
    if let Some(at) = requirement.find(['=', '!', '>', '<']) {
        let (name, rest) = requirement.split_at(at);
        let operator = ["==", "!=", "=", ">", "<"].into_iter().find(|operator| rest.starts_with(operator));
        let operator = operator.ok_or("has a `!` that is neither in front of a key nor part of `!=`")?;
        let text = rest[operator.len()..].trim();
        key(name.trim())?;
        return match operator {
            ">" | "<" if text.parse::<i64>().is_err() => {
                Err(format!("compares with `{text}`, which is no integer"))
            }
            _ => value(text),
        };
    }
    let Some((name, rest)) = requirement.split_once(char::is_whitespace) else {
        return match requirement.split_once('(') {
            Some(_) => Err("has values and neither `in` nor `notin` before them".to_owned()),
            None => key(requirement),
        };
    };
    key(name)?;
    let rest = rest.trim();
    let list = ["in", "notin"].into_iter().find_map(|word| rest.strip_prefix(word)?.trim().strip_prefix('('));
    let list = list.and_then(|list| list.strip_suffix(')'));
    let list = list.ok_or("has neither an operator nor a list of values, as in `tier in (a,b)`")?;
    list.split(',').try_for_each(|text| value(text.trim()))
}

/// A label's name, with or without a DNS name and a slash before it.
fn key(text: &str) -> Result<(), String> {
    let (prefix, name) = text.split_once('/').map_or((None, text), |(prefix, name)| (Some(prefix), name));
    let in_dns = |label: &str| {
        let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        !label.is_empty() && label.bytes().all(inner) && !label.starts_with('-') && !label.ends_with('-')
    };
    if prefix.is_some_and(|prefix| prefix.len() > 253 || !prefix.split('.').all(in_dns)) || !is_word(name) {
        return Err(format!("has the key `{text}`, which is no name of a label"));
    }
    Ok(())
}

fn value(text: &str) -> Result<(), String> {
    if text.is_empty() || is_word(text) {
        Ok(())
    } else {
        Err(format!("has the value `{text}`, which no label can have"))
    }
}

/// What names and values of labels are made of.
fn is_word(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let outer = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    bytes.len() <= 63 && outer(bytes.first()) && outer(bytes.last()) && text.bytes().all(inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_api_server_takes_is_taken() {
        for text in [
            "app=vllm",
            "app == vllm",
            "app!=vllm,tier in (a, b)",
            "tier notin (a,b),!canary, app",
            "tier in (a),kubernetes.io/service-name=x",
            "app=",
            "tier in ()",
            "weight>3,weight < 10",
            "in in (in,notin)",
            "tier in(a)",
        ] {
            assert_eq!(check(text), Ok(()), "{text}");
        }
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, words) in [
            ("", "is empty"),
            ("a in (", "does not close it"),
            ("a in (b", "does not close it"),
            ("a in b)", "has not opened"),
            ("a in ((b))", "within another"),
            ("a,", "an empty requirement"),
            ("a in", "neither an operator nor a list"),
            ("a on (b)", "neither an operator nor a list"),
            ("a (b)", "neither an operator nor a list"),
            ("a(b)", "neither `in` nor `notin`"),
            ("a!b", "neither in front of a key"),
            ("=b", "the key ``"),
            ("a=b=c", "the value `b=c`"),
            ("a=-b", "the value `-b`"),
            ("a/b/c=d", "the key `a/b/c`"),
            ("A.example/b=c", "the key `A.example/b`"),
            ("a>b", "no integer"),
            ("a b", "neither an operator nor a list"),
            ("a=b&limit=1", "the value `b&limit=1`"),
        ] {
            let why = check(text).unwrap_err();
            assert!(why.contains(words), "{text}: {why}");
        }
    }
}
