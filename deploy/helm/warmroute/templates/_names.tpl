{{- define "warmroute.name" -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{- define "warmroute.selector" -}}
app.kubernetes.io/name: warmroute
app.kubernetes.io/instance: {{ include "warmroute.name" . }}
{{- end }}

{{- define "warmroute.labels" -}}
{{ include "warmroute.selector" . }}
{{- end }}

{{- /* An image by its tag or by its digest. */ -}}
{{- define "warmroute.image" -}}
{{- $repository := .Values.image.repository }}{{ $tag := .Values.image.tag | toString }}
{{- if contains "@" $repository }}
{{- if $tag }}{{ fail (printf "image.tag: image.repository has a digest, %s, which says all; leave the tag out" $repository) }}{{ end }}
{{- $repository }}
{{- else if regexMatch ":[^/]*$" $repository }}
{{- fail (printf "image.repository: %s has a tag; give that as image.tag" $repository) }}
{{- else }}{{ $repository }}:{{ $tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* The config: what the values name by themselves, under what `config` says. All else that depends on it is made from this. */ -}}
{{- define "warmroute.config" -}}
{{- $workers := dict "kubernetes" (.Values.workers | default list) "zone_file" "/etc/podinfo/zone" }}
{{- if .Values.apiKeySecret }}{{ $_ := set $workers "api_key_file" "/etc/warmroute-api-key/api-key" }}{{ end }}
{{- $own := dict "listen" "0.0.0.0:8000" "admin" "0.0.0.0:9900" "mode" (.Values.mode | default "kv") "workers" $workers }}
{{- if .Values.hashKeySecret }}{{ $_ := set $own "cache" (dict "hash_key_file" "/etc/warmroute-hash-key/hash-key") }}{{ end }}
{{- if .Values.sharing.urls }}
{{- $sharing := dict "urls" .Values.sharing.urls }}
{{- if .Values.sharing.passwordSecret }}{{ $_ := set $sharing "password_file" "/etc/warmroute-store/password" }}{{ end }}
{{- $_ := set $own "sharing" $sharing }}
{{- end }}
{{- toYaml (mergeOverwrite $own (deepCopy .Values.config)) }}
{{- end }}

{{- /* The port of an address to listen on, which others are to reach: (list key address). */ -}}
{{- define "warmroute.port" -}}
{{- $key := index . 0 }}{{ $at := index . 1 | toString }}
{{- if not (regexMatch "^([0-9.]+|\\[[0-9a-fA-F:.]+\\]):[1-9][0-9]*$" $at) }}
{{- fail (printf "config.%s: %q is not an IP address and a port, as in 0.0.0.0:8000" $key $at) }}
{{- end }}
{{- if regexMatch "^(127\\.|\\[::1\\])" $at }}
{{- fail (printf "config.%s: %s is reached from inside the pod only, so no probe and no client would get through; 0.0.0.0 is all of the pod's addresses" $key $at) }}
{{- end }}
{{- regexFind "[0-9]+$" $at }}
{{- end }}

{{- /* Whole seconds of a duration as the config has them: (list key duration). */ -}}
{{- define "warmroute.seconds" -}}
{{- $key := index . 0 }}{{ $text := index . 1 | toString }}
{{- if not (regexMatch "^( *[0-9]+ *[a-z]+)+ *$" $text) }}
{{- fail (printf "config.%s: %q is not a duration, as in 5m or 1m 30s" $key $text) }}
{{- end }}
{{- $units := dict "s" 1 "sec" 1 "second" 1 "seconds" 1 "m" 60 "min" 60 "minute" 60 "minutes" 60 "h" 3600 "hr" 3600 "hour" 3600 "hours" 3600 }}
{{- $sum := 0 }}
{{- range regexFindAll "[0-9]+ *[a-z]+" $text -1 }}
{{- $number := regexFind "^[0-9]+" . | int }}{{ $unit := regexFind "[a-z]+$" . }}
{{- if hasKey $units $unit }}{{ $sum = add $sum (mul $number (get $units $unit)) }}
{{- else if has $unit (list "ms" "msec") }}{{ $sum = add $sum (div (add $number 999) 1000) }}
{{- else }}{{ fail (printf "config.%s: the chart reads h, m, s and ms, and %q is in %q; write it in those" $key $text $unit) }}{{ end }}
{{- end }}
{{- $sum }}
{{- end }}

{{- /* How long the kubelet waits: the sleep before the signal, the drain, and some seconds. */ -}}
{{- define "warmroute.grace" -}}
{{- $config := include "warmroute.config" . | fromYaml }}
{{- $drain := include "warmroute.seconds" (list "drain.deadline" (dig "drain" "deadline" "5m" $config)) | int }}
{{- $announce := include "warmroute.seconds" (list "drain.announce" (dig "drain" "announce" "5s" $config)) | int }}
{{- if gt $announce $drain }}
{{- fail (printf "config.drain.announce: %d s are more than config.drain.deadline, %d s, which includes it" $announce $drain) }}
{{- end }}
{{- $given := .Values.terminationGracePeriodSeconds }}
{{- if kindIs "invalid" $given }}{{ add $drain 30 }}
{{- else if lt (int $given) (int (add $drain 3)) }}
{{- fail (printf "terminationGracePeriodSeconds: after %d s a pod would be killed while it still drains: config.drain.deadline is %d s, and 3 s go before it. Leave it out, and it follows" (int $given) $drain) }}
{{- else }}{{ $given }}{{ end }}
{{- end }}

{{- /* What cannot be meant. */ -}}
{{- define "warmroute.check" -}}
{{- $config := include "warmroute.config" . | fromYaml }}
{{- if and (get $config "sharing") (not (dig "cache" "hash_key_file" "" $config)) }}
{{- fail "sharing: needs hashKeySecret: what replicas tell each other is in hashes by a common key" }}
{{- end }}
{{- $entries := dig "workers" "kubernetes" (list) $config | default list }}
{{- $own := .Values.service.name | default (include "warmroute.name" .) }}
{{- $made := .Values.workersService.name }}
{{- $admin := printf "%s-admin" (include "warmroute.name" .) }}
{{- $mode := .Values.mode }}
{{- if and $mode .Values.config.mode (ne $mode .Values.config.mode) }}
{{- fail (printf "mode: it is %s, and config.mode is %s; leave one of them out" $mode .Values.config.mode) }}
{{- end }}
{{- if eq $own $admin }}
{{- fail (printf "service.name: the chart makes a Service %s of its own, for the admin port" $admin) }}
{{- end }}
{{- if and .Values.workersService.selector (has $made (list $own $admin)) }}
{{- fail (printf "workersService.name: the chart makes a Service %s of its own" $made) }}
{{- end }}
{{- range list "app.kubernetes.io/name" "app.kubernetes.io/instance" }}
{{- if hasKey $.Values.podLabels . }}
{{- fail (printf "podLabels: %s is what the Deployment and its Services find their pods by" .) }}
{{- end }}
{{- end }}
{{- if not (or $entries (dig "workers" "static" list $config) (dig "workers" "dns" list $config)) }}
{{- fail "workers: there are none, so the router would not start; name a Service, or give config.workers.static or config.workers.dns" }}
{{- end }}
{{- $names := false }}
{{- range $entries }}
{{- if not (or .service .selector) }}{{ fail "workers: name a `service`, or give a `selector`" }}{{ end }}
{{- if and .service .selector }}{{ fail (printf "workers: name a `service` (%s) or a `selector` (%s), not both" .service .selector) }}{{ end }}
{{- $here := or (not .namespace) (eq (toString .namespace) $.Release.Namespace) }}
{{- if and $here .service (has (toString .service) (list $own $admin)) }}
{{- fail (printf "workers: the Service %s selects warmroute's own pods; the workers need a Service of their own (workersService.selector makes one)" .service) }}
{{- end }}
{{- if and $here (or .selector (eq (toString .service) $made)) }}{{ $names = true }}{{ end }}
{{- end }}
{{- range (dig "workers" "dns" list $config) }}
{{- $labels := splitList "." (.name | default "" | toString) }}
{{- if and (has (first $labels) (list $own $admin)) (has (index (append $labels $.Release.Namespace) 1) (list $.Release.Namespace "")) }}
{{- fail (printf "config.workers.dns: %s is the Service of warmroute's own pods; the workers need one of their own" .name) }}
{{- end }}
{{- end }}
{{- if and .Values.workersService.selector (not $names) }}
{{- fail (printf "workersService: makes the Service %s in the namespace %s, and no entry of workers names it" $made .Release.Namespace) }}
{{- end }}
{{- end }}
